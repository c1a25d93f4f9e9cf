"""A product of blocks in a program that a compiler partitions: each device multiplies its part.

Rows of either operand stay where they are, and so does the axis that is summed over, if both
operands have it divided alike into whole blocks: then the devices' sums are added up. Whatever is
placed in another way is gathered before the call.

JAX's own rule for the call reads the names of a mesh, which not every program has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxamp.core import jax_compat
from jaxamp.kernels.tiled_mesh import Axes, divided, mesh_of, names_of, parts

Multiply = Callable[..., jax.Array]
"""A product of values [B, M, K] and [B, N, K] with scales [B, M, k] and [B, N, k]: [B, M, N]."""


def partitioned(multiply: Multiply) -> Multiply:
    """Return a product as a function that a compiler may partition.

    Args:
      multiply: the product, on one device.
    """

    def place(shapes: Any) -> tuple[Any, ...]:
        mesh, specs, summed = _placed(shapes)
        lhs, rhs, result = (NamedSharding(mesh, spec) for spec in specs)

        def local(*operands: Any) -> tuple[jax.Array]:
            out = multiply(*operands)
            return (lax.psum(out, summed) if summed else out,)

        return mesh, local, (result,), (lhs, rhs, lhs, rhs)

    def run(*operands: Any) -> jax.Array:
        call = divided(
            lambda *operands: (multiply(*operands),),
            place,
            sharding_rule="b m (k l), b n (k l), b m k, b n k -> b m n",
            l=operands[0].shape[-1] // operands[2].shape[-1],
            reduction_factors=("k",),
            need_replication_factors=("l",),
        )
        return call(*operands)[0]

    return run


def _placed(
    shapes: Any,
) -> tuple[AbstractMesh, tuple[PartitionSpec, PartitionSpec, PartitionSpec], tuple[str, ...]]:
    """Return a mesh, where operands and result lie on it, and the axes that this is added up over.

    Args:
      shapes: types of the operands as they are placed.
    """
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
    return mesh, specs, tuple(names_of(k))


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
