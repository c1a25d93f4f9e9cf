"""Statistics of operations: the row that one run adds, and the table of all rows.

Each operation has a row of sums and a row of maxima, so that loops need no more memory than calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxamp.core.formats import Precision, is_narrow

SUMS = ("count", "error", "reference", "overflow", "underflow", "subnormal")
PEAKS = ("error", "low", "shadow")


class Ledger(NamedTuple):
    """Sums f32[..., 6] and maxima f32[..., 3] of one run, or of all operations of a program.

    See ``SUMS`` and ``PEAKS``.
    """

    sums: jax.Array
    peaks: jax.Array

    @classmethod
    def empty(cls, *shape: int) -> Ledger:
        """Return the row of an operation that is not measured, or so many rows."""
        return cls(
            jnp.zeros((*shape, len(SUMS)), jnp.float32),
            jnp.zeros((*shape, len(PEAKS)), jnp.float32),
        )

    def enter(self, numbers: range, rows: Sequence[Ledger]) -> Ledger:
        """Add the rows of operations of consecutive numbers."""
        if not rows:
            return self
        part = slice(numbers.start, numbers.stop)
        sums, peaks = (jnp.stack(column) for column in zip(*rows, strict=True))
        return Ledger(self.sums.at[part].add(sums), self.peaks.at[part].max(peaks))


def joined(rows: Sequence[Ledger]) -> Ledger:
    """Merge the rows of an operation with several results."""
    if len(rows) == 1:
        return rows[0]
    sums, peaks = zip(*rows, strict=True)
    return Ledger(jnp.stack(sums).sum(axis=0), jnp.stack(peaks).max(axis=0))


def peak_of(array: Any) -> jax.Array:
    """Return the largest magnitude f32[] of an array: NaN if there is one, zero if it is empty."""
    if jnp.size(array) == 0:
        return jnp.float32(0)
    return _largest(jnp.abs(_wide(array)))


def measured(low: Any, shadow: Any, precision: Precision | None) -> Ledger:
    """Return the row of a result; without a shadow, that of one that is the same."""
    zero, size = jnp.float32(0), jnp.float32(math.prod(jnp.shape(low)))
    if shadow is None or jnp.size(low) == 0:
        peak = _visible(peak_of(low))
        return Ledger(jnp.stack([size, *[zero] * 5]), jnp.stack([zero, peak, peak]))
    wide, reference = _wide(low), _wide(shadow)
    error = jnp.abs(wide - reference)
    fine = jnp.isfinite(error)
    error, known = jnp.where(fine, error, 0), jnp.where(fine, jnp.abs(reference), 0)
    flags = [flag.astype(jnp.float32) for flag in _flags(wide, reference, precision)]
    totals, peaks = _reduced([error * error, known * known, *flags], [error, jnp.abs(wide), known])
    totals += [zero] * (len(SUMS) - 1 - len(totals))
    peaks[1] = _visible(peaks[1])
    return Ledger(jnp.stack([size, *totals]), jnp.stack(peaks))


def _flags(wide: jax.Array, reference: jax.Array, precision: Precision | None) -> list[jax.Array]:
    """Return masks of the numbers that overflowed, became zero, or are stored as subnormals.

    Formats with the range of f32 lose no small number that f32 would keep.
    """
    if not is_narrow(precision):
        return []
    overflow = ~jnp.isfinite(wide) & jnp.isfinite(reference)
    if precision.smallest_normal <= Precision.F32.smallest_normal:
        return [overflow]
    magnitude, needed = jnp.abs(wide), jnp.abs(reference)
    small = precision.smallest_normal
    lost = (magnitude == 0) & (needed > 0) & (needed < small)
    return [overflow, lost, (magnitude > 0) & (magnitude < small)]


def _reduced(
    addends: Sequence[jax.Array], candidates: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Sum some arrays and take the maxima of others, all of one shape.

    One reduction of all stores no masks in between. Axis by axis, fewer numbers are added up one
    after the other.
    """

    def fold(left: Any, right: Any) -> Any:
        pairs = list(zip(left, right, strict=True))
        added = [a + b for a, b in pairs[: len(addends)]]
        return (*added, *(jnp.maximum(a, b) for a, b in pairs[len(addends) :]))

    arrays = (*addends, *candidates)
    zeros = tuple(np.float32(0) for _ in arrays)
    while axes := range(arrays[0].ndim):
        arrays = lax.reduce(arrays, zeros, fold, axes[-1:])
    return [*arrays[: len(addends)]], [*arrays[len(addends) :]]


def _visible(peak: jax.Array) -> jax.Array:
    """Replace NaN by infinity, which a maximum does not lose."""
    return jnp.where(jnp.isnan(peak), jnp.inf, peak)


def _wide(array: Any) -> jax.Array:
    array = jnp.asarray(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.abs(array)
    return array.astype(jnp.float32)


# Leading axes first: XLA:CPU vectorizes a reduction that keeps the last axis.
def _largest(array: jax.Array) -> jax.Array:
    return jnp.max(jnp.max(array, axis=tuple(range(array.ndim - 1)))) if array.ndim else array
