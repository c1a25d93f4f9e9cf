"""Marks: for each value, whether it is finite, and which operation is to blame if it is not.

A mark travels with a value. An operation whose result holds an infinity or a NaN hands on the mark
of an operand of the same kind; where it has none, it is itself to blame. A NaN made of an infinity
is blamed on what made the infinity. Of several to blame, the earliest counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

FINITE, INFINITY, NAN = 0, 1, 2
GIVEN = -1  # the site of what came in from outside
_NEVER = np.iinfo(np.int32).max


class Mark(NamedTuple):
    """What is known of one value; every entry is an int32[].

    Attributes:
      kind: ``FINITE``, or the worst that it holds.
      time: when the operation to blame ran; ``_NEVER`` for what came in from outside.
      site: number of the operation to blame, or ``GIVEN``.
      born: what that operation made.
      loops: which iteration it was, of each loop around it.
    """

    kind: Any
    time: Any
    site: Any
    born: Any
    loops: tuple[Any, ...]


def finite(depth: int) -> Mark:
    """The mark of a finite value, in a program whose loops are nested `depth` deep."""
    return given(np.int32(FINITE), depth)


def given(kind: Any, depth: int) -> Mark:
    """The mark of what comes in from outside."""
    zero = np.int32(0)
    return Mark(kind, np.int32(_NEVER), np.int32(GIVEN), kind, (zero,) * depth)


def kind_of(peak: Any) -> jax.Array:
    """The worst that an array holds, by its largest magnitude, which is NaN if there is one."""
    one, two = np.int32(INFINITY), np.int32(NAN)
    infinite = lax.select(lax.eq(peak, np.float32(np.inf)), one, np.int32(FINITE))
    return lax.select(lax.ne(peak, peak), two, infinite)


def made(kind: Any, operands: Sequence[Mark], site: int, time: Any, loops: Sequence[Any]) -> Mark:
    """The mark of a result.

    Args:
      kind: the worst that the result holds.
      operands: marks of the float operands.
      site: number of the operation.
      time: when it runs.
      loops: iterations of the loops around it, and zeros for as many as the program has elsewhere.
    """
    own = Mark(kind, time, np.int32(site), kind, tuple(loops))
    if not operands:
        return own
    same = _earliest(operands, [lax.eq(mark.kind, kind) for mark in operands])
    makes_nan = lax.eq(kind, np.int32(NAN))
    behind = _earliest(operands, [_may_be_behind(mark) & makes_nan for mark in operands])
    blamed = _chosen(same[1], same[0], _chosen(behind[1], behind[0], own))
    # XLA would otherwise compute chains of marks again for each of their readers.
    return lax.optimization_barrier(blamed._replace(kind=kind))


def worse(one: Mark, other: Mark) -> Mark:
    """Of two marks of parts of one array that of the whole: the worse, or else the earlier."""
    ties = lax.eq(one.kind, other.kind) & lax.le(one.time, other.time)
    return _chosen(lax.gt(one.kind, other.kind) | ties, one, other)


def _may_be_behind(mark: Mark) -> Any:
    infinite = lax.eq(mark.kind, np.int32(INFINITY))
    return infinite & lax.ne(mark.site, np.int32(GIVEN))


def _earliest(marks: Sequence[Mark], eligible: Sequence[Any]) -> tuple[Mark, Any]:
    """The earliest of the eligible marks, and whether there is any."""
    best, found = marks[0], eligible[0]
    for mark, is_eligible in zip(marks[1:], eligible[1:], strict=True):
        earlier = is_eligible & (~found | lax.lt(mark.time, best.time))
        best, found = _chosen(earlier, mark, best), found | is_eligible
    return best, found


def _chosen(condition: Any, one: Mark, other: Mark) -> Mark:
    return jax.tree.map(lambda a, b: a if a is b else lax.select(condition, a, b), one, other)
