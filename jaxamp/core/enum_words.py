"""Sets of an enum's members, as users write them: by words."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TypeVar

from jaxamp.errors import PolicyError, accepted

_E = TypeVar("_E", bound=enum.Enum)


def chosen(kind: type[_E], words: _E | str | Iterable[_E | str]) -> frozenset[_E]:
    """Read members of an enum: one or several, or their words; ``"all"`` for all, none for none.

    Raises:
      PolicyError: a word names no member.

    >>> from jaxamp.core.guards import Guard
    >>> chosen(Guard, "no-gain")
    frozenset({<Guard.NO_GAIN: 'no-gain'>})
    """
    if isinstance(words, (kind, str)):
        return frozenset(kind) if words == "all" else frozenset({_member(kind, words)})
    if not isinstance(words, Iterable):
        raise PolicyError(f"{kind.__name__}s are words or none at all, `()`, not {words!r}.")
    return frozenset(_member(kind, word) for word in words)


def _member(kind: type[_E], word: _E | str) -> _E:
    if isinstance(word, kind):
        return word
    words = {member.value: member for member in kind}
    key = str(word).strip().lower().replace("_", "-")
    if key not in words:
        raise PolicyError(f"Unknown {kind.__name__.lower()} {word!r}. {accepted(key, words)}")
    return words[key]
