"""Tiles of shared memory: how they lie there, and how they are read into registers."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from jaxamp.core import jax_compat
from jaxamp.kernels.params import mosaic_gpu

F32 = np.dtype(np.float32)
ROWS = 64  # of the WGMMA layout


def load(ref: Any, index: Any, layout: Any) -> Any:
    """Read part of a tile into registers."""
    part = jax_compat.indexed_for_load(ref, index)
    return mosaic_gpu().load(*part, layout=layout, optimized=False)


def over_rows(by_row: Any, cols: int) -> Any:
    """Return a number for each row, in all columns."""
    return lax.broadcast_in_dim(by_row, (by_row.shape[0], cols), (0,))


def over_columns(by_col: Any, rows: int) -> Any:
    """Return a number for each column, in all rows."""
    return lax.broadcast_in_dim(by_col, (rows, by_col.shape[0]), (1,))


def swizzled(width: int, dtype: Any) -> tuple[Any, ...]:
    """Return the transforms of a tile in shared memory that avoid bank conflicts."""
    plgpu = mosaic_gpu()
    size = np.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(width * size * 8)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)
