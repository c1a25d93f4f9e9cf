"""Marks: for each value, whether it is finite, and which operation is to blame if it is not.

An operation whose result holds an infinity or a NaN hands on the mark of an operand of the same
kind; where it has none, it is itself to blame. A NaN made of an infinity is blamed on what made the
infinity. Of several to blame, the earliest counts.

Marks of a straight-line segment, with no loop or branch in it, are the rows of one table.
The program itself computes one number for each value, its largest magnitude; the table is made of
all of these at once, so that it takes no longer to compile for many operations than for few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxamp.numerics.statistics import peak_of

FINITE, INFINITY, NAN = 0, 1, 2
GIVEN = -1  # the site of what came in from outside
_LAST = np.iinfo(np.int32).max
_NEVER = _LAST - 1
_KIND, _TIME, _SITE, _FACTS = 0, 1, 2, 4  # columns; those from _FACTS on are the loops


class Mark(NamedTuple):
    """The state of one value, read from its row.

    Attributes:
      kind: ``FINITE``, or the worst that it holds.
      time: when the operation to blame ran; never for what came in from outside.
      site: number of the operation to blame, or ``GIVEN``.
      born: what that operation made.
      loops: which iteration it was, of each loop around it; zeros follow.
    """

    kind: int
    time: int
    site: int
    born: int
    loops: tuple[int, ...]

    @classmethod
    def of(cls, row: Any) -> Mark:
        """Return the mark in a row."""
        facts = [int(fact) for fact in row]
        return cls(*facts[:_FACTS], loops=tuple(facts[_FACTS:]))


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True)
class Slot:
    """The number of a row; that of ``Slot(0)`` is the mark of what is finite."""

    number: int


class _Entry(NamedTuple):
    sample: Any
    operands: tuple[int, ...]
    site: int
    tick: int


class Tape:
    """The marks of a straight-line segment of a program, and its clock.

    Args:
      time: when it starts, an int32[].
      loops: iterations of the loops around.
      depth: how deep loops are nested in the whole program.
    """

    def __init__(self, time: Any, loops: Sequence[Any], depth: int) -> None:
        self.around, self._depth = tuple(loops), depth
        self._start, self._ticks = time, 0
        self._known: Any = finite(depth)[None]
        self._length = 1
        self._entries: list[_Entry] = []

    @property
    def time(self) -> Any:
        """The current tick, i32[]."""
        return self._start + np.int32(self._ticks)

    def tick(self) -> None:
        """Advance the clock."""
        self._ticks += 1

    def resume(self, time: Any) -> None:
        """Resume after a loop or branch, which has a clock of its own."""
        self._resolve()
        self._start, self._ticks = time, 0

    def add(self, array: Any, operands: Sequence[Slot], site: int) -> Slot:
        """Add the mark of a result, or of an input, and return its slot.

        Args:
          array: what it is.
          operands: marks of the float operands.
          site: number of the operation, or ``GIVEN``.
        """
        taken = tuple({slot.number for slot in operands} - {0})
        self._entries.append(_Entry(_sample(array), taken, site, self._ticks))
        self._length += 1
        return Slot(self._length - 1)

    def adopt(self, rows: Sequence[Any]) -> list[Slot]:
        """Append the rows of another tape, and return their slots."""
        if not rows:
            return []
        self._resolve()
        self._known = jnp.concatenate([self._known, jnp.stack(rows)])
        self._length += len(rows)
        return [Slot(number) for number in range(self._length - len(rows), self._length)]

    def rows(self, slots: Sequence[Slot]) -> list[Any]:
        """Return rows for another tape."""
        self._resolve()
        return [lax.index_in_dim(self._known, slot.number, keepdims=False) for slot in slots]

    def _resolve(self) -> None:
        """Find the operation to blame for what was added; quickly, if all of it is finite."""
        if not self._entries:
            return
        own = self._own(self._entries)
        table, first = jnp.concatenate([self._known, own]), len(self._known)
        operands = _padded([entry.operands for entry in self._entries])
        self._known = lax.cond(
            jnp.any(own[:, _KIND] != FINITE),
            lambda table: _blame_operands(table, operands, first),
            lambda table: table,
            table,
        )
        self._entries = []

    def _own(self, entries: Sequence[_Entry]) -> Any:
        """Return rows that blame each operation itself."""
        kinds = _kinds(_stacked([entry.sample for entry in entries]))
        sites = np.array([entry.site for entry in entries], np.int32)
        ticks = np.array([entry.tick for entry in entries], np.int32)
        times = jnp.where(sites == GIVEN, np.int32(_NEVER), self._start + ticks)
        around = [*self.around, *[0] * (self._depth - len(self.around))]
        loops = [jnp.full(kinds.shape, done, jnp.int32) for done in around]
        return jnp.stack([kinds, times, sites, kinds, *loops], axis=1)


def finite(depth: int) -> np.ndarray:
    """Return the row i32[4 + depth] of a finite value, in a program with `depth` nested loops."""
    return np.array([FINITE, _NEVER, GIVEN, FINITE, *[0] * depth], np.int32)


def part(row: Any, array: Any) -> Any:
    """Return the row of a part of an array, which may be finite where the whole is not."""
    return jnp.concatenate([_kinds(_sample(array))[None], row[_KIND + 1 :]])


def worse(one: Any, other: Any) -> Any:
    """Merge the status rows of two slices: the worse kind; on a tie, the earlier tick."""
    ties = (one[_KIND] == other[_KIND]) & (one[_TIME] <= other[_TIME])
    return jnp.where((one[_KIND] > other[_KIND]) | ties, one, other)


def _sample(array: Any) -> jax.Array:
    """Return an f32[] that is NaN or infinite if any element is; a scalar as it is."""
    is_real = jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(jnp.float32) if array.shape == () and is_real else peak_of(array)


def _stacked(samples: Sequence[Any]) -> Any:
    """Stack all samples into f32[n]; the sign is arbitrary.

    XLA would fuse a sum with each of its partial sums, and so compute these again for each. What a
    branch takes it computes once; the branches differ because it would otherwise choose one.
    """
    return lax.cond(samples[0] > 0, jnp.stack, lambda samples: -jnp.stack(samples), samples)


def _kinds(samples: Any) -> jax.Array:
    """Return the kind i32[...] of each sample: finite, infinite or NaN."""
    return jnp.where(jnp.isnan(samples), NAN, jnp.isinf(samples).astype(jnp.int32))


def _blame_operands(table: Any, operands: np.ndarray, first: int) -> Any:
    """Propagate the blame to operands, row by row from `first`."""

    def judge(number: Any, table: Any) -> Any:
        own = lax.dynamic_index_in_dim(table, first + number, keepdims=False)
        taken = table[lax.dynamic_index_in_dim(operands, number, keepdims=False)]
        kinds, times, sites = taken[:, _KIND], taken[:, _TIME], taken[:, _SITE]
        kind = own[_KIND]
        same = kinds == kind
        behind = (kind == NAN) & (kinds == INFINITY) & (sites != GIVEN) & ~jnp.any(same)
        order = jnp.where(same | behind, times, _LAST)
        earliest = jnp.argmin(order)
        passes = (kind != FINITE) & (order[earliest] != _LAST)
        row = jnp.where(passes, taken[earliest].at[_KIND].set(kind), own)
        return lax.dynamic_update_index_in_dim(table, row, first + number, 0)

    return lax.fori_loop(0, len(operands), judge, table)


def _padded(operands: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Return row numbers as a table i32[n, width], padded with the row that is finite."""
    width = max(map(len, operands), default=0) or 1
    return np.array([[*row, *[0] * (width - len(row))] for row in operands], np.int32)
