"""Layout of the blocks of an array that share a scale factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxamp.core.formats import CastConfig
from jaxamp.errors import PolicyError


def scales_result(cast: CastConfig, summed: int) -> bool:
    """Return whether scales can multiply the product that sums so many: one for all, or each row.

    >>> scales_result(CastConfig.plain("f8_e4m3"), 64)
    True
    """
    block = cast.sf_block
    return block is None or (block[0] == 1 and block[1] >= summed)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of an array's last two axes; leading axes are apart.

    A block at the edge is smaller where ``rows`` and ``cols`` do not divide the array: nothing is
    padded as far as a caller can see.

    Attributes:
      rows: rows of a block; 1 for an array of one axis.
      cols: columns of a block.

    >>> Blocks(1, 128).factors((3, 300))
    (3, 3)
    """

    rows: int
    cols: int

    @classmethod
    def of(cls, cast: CastConfig, shape: tuple[int, ...]) -> Blocks | None:
        """Return the blocks that a cast makes of an array; ``None`` for one block, the whole.

        Raises:
          PolicyError: the array has fewer axes than the block.
        """
        if cast.sf_block is None:
            return None
        rows, cols = cast.sf_block
        if len(shape) < (2 if rows > 1 else 1):
            raise PolicyError(
                f"An array of shape {shape} has no blocks of {rows} x {cols}: they lie on the last "
                "two axes. Scale the whole tensor (sf_block=None), or give the array more axes."
            )
        return cls(rows, cols)

    def factors(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scale factors of an array of that shape: one for each block."""
        *leading, cols = shape
        columns = -(-cols // self.cols)
        if not leading:
            return (columns,)
        return (*leading[:-1], -(-leading[-1] // self.rows), columns)

    def amax(self, x: Any) -> jax.Array:
        """Return the largest magnitude in each block; NaN if there is a NaN."""
        split = jnp.abs(self._split(x))
        return jnp.max(split, axis=(-3, -1)).reshape(self.factors(x.shape))

    def spread(self, factors: Any, shape: tuple[int, ...]) -> jax.Array:
        """Return each factor over its whole block: an array of the shape that was divided."""
        rows, cols = self._tail(shape)
        over_rows = factors.reshape(*shape[:-2], -1, 1, factors.shape[-1], 1)
        blocks = over_rows.shape[-4], self.rows, over_rows.shape[-2], self.cols
        full = jnp.broadcast_to(over_rows, (*shape[:-2], *blocks))
        merged = full.reshape(*shape[:-2], blocks[0] * blocks[1], blocks[2] * blocks[3])
        return merged[..., :rows, :cols].reshape(shape)

    def _split(self, x: Any) -> jax.Array:
        """Reshape to ``(..., row blocks, rows, column blocks, cols)``, padded with zeros."""
        rows, cols = self._tail(x.shape)
        matrix = x.reshape(*x.shape[:-2], rows, cols)
        margins = [(0, 0)] * (matrix.ndim - 2) + [(0, -rows % self.rows), (0, -cols % self.cols)]
        filled = jnp.pad(matrix, margins) if any(after for _, after in margins) else matrix
        row_blocks, column_blocks = -(-rows // self.rows), -(-cols // self.cols)
        return filled.reshape(*x.shape[:-2], row_blocks, self.rows, column_blocks, self.cols)

    @staticmethod
    def _tail(shape: tuple[int, ...]) -> tuple[int, int]:
        return (1, shape[-1]) if len(shape) == 1 else (shape[-2], shape[-1])
