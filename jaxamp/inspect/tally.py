"""The cost of operations, as a value that adds up over loops and calls."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Sums over operations.

    Attributes:
      operations: how many.
      flops: floating-point operations; a multiplication and an addition are two.
      bytes: what they read and write, were each a kernel of its own.
      bytes_f32: the same in the dtypes of the original program.
      inserted: casts made.
      shared: reads that found a cast made already.
      cancelled: reads that found the value stored in the narrow precision that they want, where a
        cast at every operation would have widened and narrowed it.

    >>> one = Tally(operations=1, flops=8)
    >>> 3 * one + one == Tally(operations=4, flops=32)
    True
    """

    operations: int = 0
    flops: int = 0
    bytes: int = 0
    bytes_f32: int = 0
    inserted: int = 0
    shared: int = 0
    cancelled: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(**{name: getattr(self, name) + getattr(other, name) for name in NAMES})

    def __mul__(self, times: int) -> Tally:
        return Tally(**{name: times * getattr(self, name) for name in NAMES})

    __rmul__ = __mul__

    @property
    def saved(self) -> int:
        """Bytes that the original program moves and this one does not.

        >>> Tally(bytes=6, bytes_f32=10).saved
        4
        """
        return self.bytes_f32 - self.bytes


NAMES = tuple(field.name for field in dataclasses.fields(Tally))
