"""Count what an equation costs, in floating-point operations and elements, and add up costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn

from jaxamp.core.taxonomy import OpKind
from jaxamp.jaxprs.contracted import multiplied, size

_SLICES = ("slice", "dynamic_slice", "gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Sums over operations.

    Attributes:
      operations: how many.
      flops: floating-point operations; a multiplication and an addition are two.
      bytes: what they read and write, were each a kernel of its own.
      bytes_f32: the same in the dtypes of the original program.
      bytes_narrow: of `bytes`, those of floats of 16 bits or fewer.

    >>> one = Tally(operations=1, flops=8)
    >>> 3 * one + one == Tally(operations=4, flops=32)
    True
    """

    operations: int = 0
    flops: int = 0
    bytes: int = 0
    bytes_f32: int = 0
    bytes_narrow: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(**{name: getattr(self, name) + getattr(other, name) for name in _SUMS})

    def __mul__(self, times: int) -> Tally:
        return Tally(**{name: times * getattr(self, name) for name in _SUMS})

    __rmul__ = __mul__

    @property
    def saved(self) -> int:
        """Bytes that the original program moves and this one does not.

        >>> Tally(bytes=6, bytes_f32=10).saved
        4
        """
        return self.bytes_f32 - self.bytes


def flops(name: str, kind: OpKind, params: dict[str, Any], ins: Sequence[Any], out: Any) -> int:
    """Count the floating-point operations of one run.

    A multiplication and the addition after it are two. An elementwise operation counts one for each
    element of its result, whatever the function; a reduction one for each element that it folds.
    """
    if (products := multiplied(name, params, ins, out)) is not None:
        return 2 * products
    if kind is OpKind.ELEMENTWISE:
        return size(out)
    return size(ins[0]) if kind is OpKind.REDUCTION and ins else 0


def touched(eqn: JaxprEqn) -> tuple[list[int], list[int]]:
    """Count the elements that one run reads of each operand, and writes of each result.

    A slice reads only what it gives, and an update in place touches only what changes.
    """
    reads, writes = [size(v.aval) for v in eqn.invars], [size(v.aval) for v in eqn.outvars]
    name = eqn.primitive.name
    if name in _SLICES:
        reads[0] = writes[0]
    elif name == "dynamic_update_slice":
        reads[0], writes[0] = 0, reads[1]
    elif name.startswith("scatter"):
        reads[0], writes[0] = 0 if name == "scatter" else reads[2], reads[2]
    return reads, writes


_SUMS = tuple(field.name for field in dataclasses.fields(Tally))
