"""Guards: exceptions to a policy's table that keep a program correct."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from jaxamp.errors import PolicyError, accepted


class Guard(enum.Enum):
    """Exception to a policy's table, which taken literally would break a program.

    >>> Guard("range") in ALL_GUARDS
    True
    """

    REDUCTION_ISLAND = "reduction-island"  # softmax, norms, losses: f32 inside, rounded at the edge
    NO_GAIN = "no-gain"  # what cannot reach Compute any more stays at boundary precision
    LOOP_CARRY = "loop-carry"  # carries that link inputs to outputs keep their dtype
    RANGE = "range"  # no finite constant becomes inf, no nonzero one zero
    EXACT_INTEGER = "exact-integer"  # integer-valued floats stay exact
    SENSITIVE = "sensitive"  # steep and cancelling operations compute in f32
    BITS = "bits"  # random bits, bitcasts and keys are untouched
    NO_KERNEL = "no-kernel"  # operations without a 16-bit implementation run in f32
    CALLBACKS = "callbacks"  # callbacks see the dtypes that they were written for

    __hash__ = object.__hash__  # Enum's own goes through the name, in Python


ALL_GUARDS = frozenset(Guard)


def parse_guards(guards: Guard | str | Iterable[Guard | str]) -> frozenset[Guard]:
    """Read guards: one or several ``Guard`` or words; ``"all"`` for all, nothing for none.

    Raises:
      PolicyError: a word names no guard.

    >>> parse_guards("no-gain")
    frozenset({<Guard.NO_GAIN: 'no-gain'>})
    """
    if isinstance(guards, (Guard, str)):
        return ALL_GUARDS if guards == "all" else frozenset({_parse_guard(guards)})
    if not isinstance(guards, Iterable):
        raise PolicyError(f"Guards are words or none at all, `()`, not {guards!r}.")
    return frozenset(map(_parse_guard, guards))


def _parse_guard(word: Guard | str) -> Guard:
    if isinstance(word, Guard):
        return word
    words = {guard.value: guard for guard in Guard}
    key = str(word).strip().lower().replace("_", "-")
    if key not in words:
        raise PolicyError(f"Unknown guard {word!r}. {accepted(key, words)}")
    return words[key]
