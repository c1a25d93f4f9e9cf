"""``block_quantize`` in Pallas for TPU.

A block of a scale factor must have last two sizes that are multiples of (8, 128) or the array's
own, so factors of rows travel as ``(column blocks, rows, 1)`` and those of whole blocks as
``(row blocks, column blocks, 1, 1)``; XLA turns them round outside.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jaxamp.core.formats import CastConfig
from jaxamp.kernels.config import KernelConfig
from jaxamp.kernels.params import tpu_params
from jaxamp.quantized.kernels.fit import NAME, block_of, semantics_in_force
from jaxamp.quantized.lowp.arithmetic import encode, magnitude_bits, scales_of

F32 = np.dtype(np.float32)


def block_quantize(
    x: Any,
    *,
    cast: CastConfig,
    transposed: bool,
    tile: tuple[int, int],
    config: KernelConfig,
    interpret: Any,
) -> list[Any]:
    """Quantize ``x`` of shape (batch, rows, columns), all multiples of the tile."""
    batch, rows, cols = x.shape

    def body(x_ref: Any, *outs: Any) -> None:
        wide = x_ref[...].astype(F32)
        _quantize_tile(wide, outs[0], outs[1], cast)
        if transposed:
            _quantize_tile(wide.T, outs[2], outs[3], cast)

    out_type = _quantized_type(batch, rows, cols, cast)
    specs = _quantized_specs(tile, cast, lambda b, i, j: (b, i, j))
    if transposed:
        out_type += _quantized_type(batch, cols, rows, cast)
        specs += _quantized_specs((tile[1], tile[0]), cast, lambda b, i, j: (b, j, i))
    params = config.tpu or tpu_params()
    outs = pl.pallas_call(
        body,
        grid=(batch, rows // tile[0], cols // tile[1]),
        in_specs=[pl.BlockSpec((None, *tile), lambda b, i, j: (b, i, j))],
        out_specs=specs,
        out_shape=out_type,
        compiler_params=params.replace(dimension_semantics=semantics_in_force("tpu", config)),
        interpret=interpret,
        name=NAME,
    )(x)
    return [_scale_matrix(out, cast) if index % 2 else out for index, out in enumerate(outs)]


def _quantize_tile(wide: Any, values_ref: Any, scale_ref: Any, cast: CastConfig) -> None:
    """Write values and scale factors of a tile in float32, block by block."""
    block_rows, block_cols = block_of(cast)
    rows, cols = wide.shape
    height = block_rows if block_rows > 1 else rows
    for j in range(cols // block_cols):
        for i in range(rows // height):
            tops, lefts = i * height, j * block_cols
            part = slice(tops, tops + height), slice(lefts, lefts + block_cols)
            axes = (0, 1) if block_rows > 1 else (1,)
            bits = jnp.max(magnitude_bits(wide[part]), axis=axes, keepdims=True)
            scale, inverse = scales_of(bits, cast)
            values_ref[part] = encode(wide[part], scale, inverse, cast.out_dtype)
            scale_ref[(i, j) if block_rows > 1 else j] = scale


def _quantized_type(batch: int, rows: int, cols: int, cast: CastConfig) -> list[Any]:
    block_rows, block_cols = block_of(cast)
    blocks = cols // block_cols
    scales = (rows // block_rows, blocks, 1, 1) if block_rows > 1 else (blocks, rows, 1)
    values = jax.ShapeDtypeStruct((batch, rows, cols), cast.out_dtype.dtype)
    return [values, jax.ShapeDtypeStruct((batch, *scales), F32)]


def _quantized_specs(tile: tuple[int, int], cast: CastConfig, place: Any) -> list[Any]:
    """Return the block specs of a tile and its factors; ``place`` gives batch, row and column."""
    block_rows, block_cols = block_of(cast)
    values = pl.BlockSpec((None, *tile), place)
    blocks = tile[1] // block_cols
    if block_rows > 1:
        shape = (None, tile[0] // block_rows, blocks, 1, 1)
        return [values, pl.BlockSpec(shape, lambda *at: (*place(*at), 0, 0))]

    def by_column(*at: Any) -> tuple[Any, ...]:
        b, i, j = place(*at)
        return b, j, i, 0

    return [values, pl.BlockSpec((None, blocks, tile[0], 1), by_column)]


def _scale_matrix(scales: Any, cast: CastConfig) -> jax.Array:
    """Return the scale factors as (batch, row blocks, column blocks)."""
    return scales[..., 0, 0] if block_of(cast)[0] > 1 else scales[..., 0].mT
