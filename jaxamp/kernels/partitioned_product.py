"""A product of blocks in a program that a compiler partitions: each device multiplies its part.

Rows of either operand stay where they are, and so does the axis that is summed over, if both
operands have it divided alike into whole blocks: then the devices' sums are added up. Whatever is
placed in another way is gathered before the call.

JAX's own rule for the call reads the names of a mesh, which not every program has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxamp.core import jax_compat
from jaxamp.kernels.tiled_mesh import Axes, mesh_of, names_of, parts

Multiply = Callable[..., jax.Array]
"""A product of values [B, M, K] and [B, N, K] with scales [B, M, k] and [B, N, k]: [B, M, N]."""


def partitioned(multiply: Multiply) -> Multiply:
    """Return a product as a function that a compiler may partition.

    Args:
      multiply: the product, on one device.
    """
    call = custom_partitioning(lambda *operands: (multiply(*operands),))

    def infer(_mesh: Any, shapes: Any, _: Any) -> list[NamedSharding]:
        return [_place(shapes).result]

    def divide(_mesh: Any, shapes: Any, _: Any) -> tuple[Any, ...]:
        place = _place(shapes)

        def local(*operands: Any) -> tuple[jax.Array]:
            out = multiply(*operands)
            return (lax.psum(out, place.summed) if place.summed else out,)

        return place.mesh, local, (place.result,), (*place.operands, *place.operands)

    def run(*operands: Any) -> jax.Array:
        call.def_partition(
            partition=divide,
            infer_sharding_from_operands=infer,
            decode_shardings=False,  # which would be with the one mesh of the program
            sharding_rule="b m (k l), b n (k l), b m k, b n k -> b m n",
            l=operands[0].shape[-1] // operands[2].shape[-1],
            reduction_factors=("k",),
            need_replication_factors=("l",),
        )
        return call(*operands)[0]

    return run


class _Place(NamedTuple):
    """A place on a mesh for operands and result, and the axes that this is added up over."""

    mesh: AbstractMesh
    operands: tuple[NamedSharding, NamedSharding]
    result: NamedSharding
    summed: tuple[str, ...]


def _place(shapes: Any) -> _Place:
    """Return where a product is computed, from the types of its operands as they are placed."""
    lhs, rhs, scale, _ = shapes
    (mesh, left), (other, right) = (mesh_of(jax_compat.tiles(x.sharding, 3)) for x in (lhs, rhs))
    if not left:
        mesh = other
    elif other != mesh:
        right = []
    (batch, rows, summed), (also, columns, too) = (
        (*axes[:3], None, None, None)[:3] for axes in (left, right)
    )
    free = _Free(mesh)
    b = free.take(batch if batch == also else None, lhs.shape[0])
    k = free.take(summed if summed == too else None, scale.shape[2])  # whole blocks
    m, n = free.take(rows, lhs.shape[1]), free.take(columns, rhs.shape[1])
    specs = PartitionSpec(b, m, k), PartitionSpec(b, n, k), PartitionSpec(b, m, n)
    first, second, result = (NamedSharding(mesh, spec) for spec in specs)
    return _Place(mesh, (first, second), result, tuple(names_of(k)))


class _Free:
    """The axes of a mesh that nothing lies along so far."""

    def __init__(self, mesh: AbstractMesh) -> None:
        self.mesh, self.taken = mesh, set[str]()

    def take(self, axes: Axes, size: int) -> Axes:
        """Return the axes if they are free and divide a size, or else none."""
        names = set(names_of(axes))
        if names & self.taken or size % parts(self.mesh, axes):
            return None
        self.taken |= names
        return axes
