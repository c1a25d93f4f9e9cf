"""The measurements of ``probe``, operation by operation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxamp.core.formats import Precision
from jaxamp.inspect.blocks import Site
from jaxamp.inspect.displayable import Data, Displayable
from jaxamp.inspect.operation import Place
from jaxamp.numerics.nonfinite import Nonfinite
from jaxamp.numerics.statistics import PEAKS, SUMS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Data):
    """The measurements of one operation, over all its runs.

    Errors are differences to the program in its original precision, with all that came before.

    Attributes:
      primitive: name of the primitive.
      kind: its kind, as ``OpKind`` spells it.
      arithmetic: precision of its operands.
      stored: precision of its result.
      scope: scope path, as the user wrote it.
      backward: whether it is in a backward pass.
      place: the user's own line.
      count: numbers that it made.
      max_error: largest error.
      rms_error: root of the mean squared error.
      sqnr: signal to quantization noise in dB: mean square of the result over that of the error.
      overflow: share of numbers that are infinite or NaN here alone.
      underflow: share of numbers that became zero because they are too small for the format.
      subnormal: share of numbers stored with less than full accuracy, as subnormals.
      largest: largest magnitude of the result.
      largest_f32: what that would be in the original program.
      headroom: largest number of the format over `largest`.
    """

    primitive: str
    kind: str
    arithmetic: str
    stored: str
    scope: str
    backward: bool
    place: Place
    count: int
    max_error: float
    rms_error: float
    sqnr: float
    overflow: float
    underflow: float
    subnormal: float
    largest: float
    largest_f32: float
    headroom: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProbeReport(Displayable):
    """The measurements of a program's operations in low precision.

    Attributes:
      policy: name of the policy.
      operations: the measured ones, in program order. Operations that only move numbers, or that
        did not run, are not in it.
      first: where the first infinity or NaN in a result came from; ``None`` if there is none.
      too_large: remarks on arguments whose numbers float16 cannot hold, where it is used.

    >>> import jax.numpy as jnp, jaxamp
    >>> found = jaxamp.probe(jnp.dot, "mixed_f16")(jnp.full((2, 300), 16.0), jnp.ones((300, 2)))
    >>> [op.primitive for op in found.operations], found.operations[0].largest
    (['dot_general'], 4800.0)
    """

    policy: str
    operations: tuple[Measured, ...]
    first: Nonfinite | None
    too_large: tuple[str, ...] = ()

    def worst(self, count: int = 10) -> tuple[Measured, ...]:
        """Return the operations of the lowest SQNR among those that differ at all."""
        differing = (op for op in self.operations if op.overflow or op.max_error > 0)
        return tuple(sorted(differing, key=lambda op: (-op.overflow, op.sqnr))[:count])

    def overflowing(self) -> Iterator[Measured]:
        """Yield the operations that made numbers too large for their format."""
        return (op for op in self.operations if op.overflow)

    def underflowing(self) -> Iterator[Measured]:
        """Yield the operations that made zeros of numbers too small for their format."""
        return (op for op in self.operations if op.underflow)


def operations_of(sites: Iterable[Site], sums: Any, peaks: Any) -> tuple[Measured, ...]:
    """Return the measurements in a filled table, whose rows are numbered like the sites."""
    totals, largest = np.asarray(sums).tolist(), np.asarray(peaks).tolist()
    rows = ((site, totals[site.number], largest[site.number]) for site in sites)
    return tuple(_measured(*row) for row in rows if row[1][0] > 0)


def _measured(site: Site, sums: Sequence[float], peaks: Sequence[float]) -> Measured:
    total, peak = dict(zip(SUMS, sums, strict=True)), dict(zip(PEAKS, peaks, strict=True))
    count = total["count"]
    stored = _stored(site)
    return Measured(
        primitive=site.eqn.primitive.name,
        kind=site.kind.value,
        arithmetic=(site.decision.operand or stored).short,
        stored=stored.short,
        scope=site.scope,
        backward=site.backward,
        place=site.place,
        count=int(count),
        max_error=peak["error"],
        rms_error=math.sqrt(total["error"] / count),
        sqnr=_decibels(total["reference"], total["error"]),
        overflow=total["overflow"] / count,
        underflow=total["underflow"] / count,
        subnormal=total["subnormal"] / count,
        largest=peak["low"],
        largest_f32=peak["shadow"],
        headroom=stored.max / peak["low"] if peak["low"] else math.inf,
    )


def _stored(site: Site) -> Precision:
    dtypes = (getattr(var.aval, "dtype", None) for var in site.eqn.outvars)
    own = (Precision.of_dtype(dtype) for dtype in dtypes if dtype is not None)
    return site.decision.output or next(filter(None, own), Precision.F32)


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
