"""Guards: exceptions to a policy's table that keep a program correct."""

from __future__ import annotations

from jaxamp.core.enum_words import Word


class Guard(Word):
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


ALL_GUARDS = frozenset(Guard)
