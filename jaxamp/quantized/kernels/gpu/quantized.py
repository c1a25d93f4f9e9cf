"""Quantized tiles: what they take, how they are made of 64 rows, and how they get to memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxamp.core.formats import CastConfig
from jaxamp.kernels.params import mosaic_gpu
from jaxamp.quantized.kernels.gpu.tiles import F32, over_rows, swizzled
from jaxamp.quantized.kernels.tile_checks import block_of
from jaxamp.quantized.lowp.arithmetic import encode, magnitude_bits, reciprocal, scale_factor


def quantized_type(
    batch: int,
    rows: int,
    cols: int,
    tile: tuple[int, int],
    cast: CastConfig,
    *,
    plain: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Return the outputs of a quantization, and what one tile of them takes in shared memory.

    Factors are stored for every row, column blocks first: so a tile's part is contiguous.
    """
    plgpu = mosaic_gpu()
    block_cols = block_of(cast)[1]
    dtype = cast.out_dtype.dtype
    out_type = [
        jax.ShapeDtypeStruct((batch, rows, cols), dtype),
        jax.ShapeDtypeStruct((batch, cols // block_cols, rows), F32),
    ]
    transforms = () if plain else swizzled(block_cols, dtype)
    scratch = [
        plgpu.SMEM(tile, dtype, transforms=transforms),
        plgpu.SMEM((tile[1] // block_cols, tile[0]), F32),
    ]
    return out_type, scratch


def write_rows(
    wide: Any, scratch: Sequence[Any], rows: Any, block: int, cast: CastConfig, amax: Any = None
) -> None:
    """Write values and factors of 64 rows of one column block."""
    values_s, scale_s = scratch
    cols = wide.shape[1]
    amax = magnitude(wide, 1) if amax is None else amax
    scale = scale_factor(as_float(amax), cast.out_dtype, round_up=cast.round_sf)
    inverse = reciprocal(scale, is_power=cast.round_sf)
    codes = encode(wide, over_rows(scale, cols), over_rows(inverse, cols), cast.out_dtype)
    values_s[rows, pl.ds(block * cols, cols)] = codes
    scale_s[block, rows] = scale


def magnitude(wide: Any, axis: int) -> Any:
    """Return the bits of the largest magnitude along an axis."""
    return jnp.max(magnitude_bits(wide), axis=axis)


def as_float(bits: Any) -> Any:
    """Return the magnitudes that ``magnitude`` has found, as numbers again."""
    return lax.bitcast_convert_type(bits, F32)


def store(
    scratch: Sequence[Any],
    outs: Sequence[Any],
    batch: Any,
    row: Any,
    col: Any,
    tile: tuple[int, int],
    cast: CastConfig,
) -> None:
    """Start the copy of a quantized tile and its factors to the outputs."""
    plgpu = mosaic_gpu()
    rows = pl.ds(row * tile[0], tile[0])
    blocks = tile[1] // block_of(cast)[1]
    values, scales = (out.at[batch] for out in outs)
    plgpu.copy_smem_to_gmem(scratch[0], values.at[rows, pl.ds(col * tile[1], tile[1])])
    plgpu.copy_smem_to_gmem(scratch[1], scales.at[pl.ds(col * blocks, blocks), rows])


def scale_matrix(scales: Any, cast: CastConfig) -> jax.Array:
    """Return the scale factors as (batch, row blocks, column blocks)."""
    return scales.mT[:, :: block_of(cast)[0]]
