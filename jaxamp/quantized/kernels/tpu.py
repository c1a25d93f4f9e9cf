"""The kernels in Pallas for TPU.

A block of a scale factor must have last two sizes that are multiples of (8, 128) or the array's
own, so factors of rows travel as ``(column blocks, rows, 1)`` and those of whole blocks as
``(row blocks, column blocks, 1, 1)``; XLA turns them round outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxamp.core.formats import CastConfig
from jaxamp.kernels.config import KernelConfig
from jaxamp.kernels.params import mosaic_tpu, tpu_params
from jaxamp.quantized.kernels.tile_checks import Axes, block_of, semantics_in_force
from jaxamp.quantized.lowp.arithmetic import encode, magnitude_bits, reciprocal, scale_factor

F32 = np.dtype(np.float32)


def block_quantize(
    x: Any,
    *,
    cast: CastConfig,
    transposed: bool,
    tile: tuple[int, int],
    axes: Axes,
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

    values, scales = _quantized_type(batch, rows, cols, cast)
    value_spec, scale_spec = _quantized_specs(tile, cast, lambda b, i, j: (b, i, j))
    out_type, specs = [values, scales], [value_spec, scale_spec]
    if transposed:
        out_type += _quantized_type(batch, cols, rows, cast)
        specs += _quantized_specs((tile[1], tile[0]), cast, lambda b, i, j: (b, j, i))
    outs = pl.pallas_call(
        body,
        grid=(batch, rows // tile[0], cols // tile[1]),
        in_specs=[pl.BlockSpec((None, *tile), lambda b, i, j: (b, i, j))],
        out_specs=specs,
        out_shape=out_type,
        compiler_params=_params(config, axes),
        interpret=interpret,
        name="block_quantize",
    )(x)
    return [_scale_matrix(out, cast) if index % 2 else out for index, out in enumerate(outs)]


def norm_quantize(
    x: Any,
    weight: Any,
    bias: Any,
    *,
    cast: CastConfig,
    center: bool,
    eps: float,
    tile: tuple[int],
    axes: Axes,
    config: KernelConfig,
    interpret: Any,
) -> list[Any]:
    """Normalize the rows of ``x``, shape (rows, columns), and quantize them."""
    rows, cols = x.shape

    def body(x_ref: Any, weight_ref: Any, bias_ref: Any, values_ref: Any, scale_ref: Any) -> None:
        wide = x_ref[...].astype(F32)
        if center:
            wide = wide - jnp.mean(wide, axis=1, keepdims=True)
        power = jnp.mean(wide * wide, axis=1, keepdims=True)
        normal = wide * lax.rsqrt(power + np.float32(eps))
        _quantize_tile(normal * weight_ref[...] + bias_ref[...], values_ref, scale_ref, cast)

    values, scales = _quantized_type(1, rows, cols, cast)
    whole = pl.BlockSpec((1, cols), lambda i: (0, 0))
    values, scales = pl.pallas_call(
        body,
        grid=(rows // tile[0],),
        in_specs=[pl.BlockSpec((tile[0], cols), lambda i: (i, 0)), whole, whole],
        out_specs=list(_quantized_specs((tile[0], cols), cast, lambda i: (0, i, 0))),
        out_shape=[values, scales],
        compiler_params=_params(config, axes),
        interpret=interpret,
        name="norm_quantize",
    )(x, weight.astype(F32)[None], bias.astype(F32)[None])
    return [values[0], _scale_matrix(scales, cast)[0]]


def block_scaled_matmul(
    a: Any,
    a_scale: Any,
    b: Any,
    b_scale: Any,
    *,
    out_dtype: Any,
    tile: tuple[int, int, int],
    axes: Axes,
    config: KernelConfig,
    interpret: Any,
) -> list[Any]:
    """Multiply (batch, M, K) with (batch, N, K); factors (batch, M, K blocks), likewise for N.

    Each block of the contraction is added to the accumulator in float32, with its factors.
    """
    (batch, m, k), n = a.shape, b.shape[1]
    tm, tn, tk = tile
    width = k // a_scale.shape[-1]

    def body(a_ref: Any, sa_ref: Any, b_ref: Any, sb_ref: Any, out_ref: Any, acc_ref: Any) -> None:
        step = pl.program_id(3)

        @pl.when(step == 0)
        def _() -> None:
            acc_ref[...] = jnp.zeros_like(acc_ref)

        for block in range(tk // width):
            part = slice(block * width, (block + 1) * width)
            product = _by_rows(a_ref[:, part], b_ref[:, part])
            acc_ref[...] += product * sa_ref[block] * sb_ref[block]

        @pl.when(step == k // tk - 1)
        def _() -> None:
            out_ref[...] = acc_ref[...].astype(out_dtype)

    blocks = tk // width
    out = pl.pallas_call(
        body,
        grid=(batch, m // tm, n // tn, k // tk),
        in_specs=[
            pl.BlockSpec((None, tm, tk), lambda b, i, j, s: (b, i, s)),
            pl.BlockSpec((None, blocks, tm, 1), lambda b, i, j, s: (b, s, i, 0)),
            pl.BlockSpec((None, tn, tk), lambda b, i, j, s: (b, j, s)),
            pl.BlockSpec((None, blocks, 1, tn), lambda b, i, j, s: (b, s, 0, j)),
        ],
        out_specs=pl.BlockSpec((None, tm, tn), lambda b, i, j, s: (b, i, j)),
        out_shape=_typed((batch, m, n), out_dtype),
        scratch_shapes=[mosaic_tpu().VMEM((tm, tn), F32)],
        compiler_params=_params(config, axes),
        interpret=interpret,
        name="block_scaled_matmul",
    )(a, a_scale.mT[..., None], b, b_scale.mT[..., None, :])
    return [out]


def _by_rows(a: Any, b: Any) -> Any:
    """Return the products of the rows of two matrices, in float32."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=F32)


def _quantize_tile(wide: Any, values_ref: Any, scale_ref: Any, cast: CastConfig) -> None:
    """Write values and scale factors of a tile in float32, block by block."""
    block_rows, block_cols = block_of(cast)
    rows, cols = wide.shape
    for j in range(cols // block_cols):
        for i in range(rows // block_rows if block_rows > 1 else 1):
            part = (
                slice(i * block_rows, (i + 1) * block_rows) if block_rows > 1 else slice(None),
                slice(j * block_cols, (j + 1) * block_cols),
            )
            scale = scale_factor(
                magnitude(wide[part], (0, 1) if block_rows > 1 else (1,)),
                cast.out_dtype,
                round_up=cast.round_sf,
            )
            inverse = reciprocal(scale, is_power=cast.round_sf)
            values_ref[part] = encode(wide[part], scale, inverse, cast.out_dtype)
            scale_ref[(i, j) if block_rows > 1 else j] = scale


def magnitude(wide: Any, axes: Sequence[int]) -> jax.Array:
    """Return the largest magnitude along axes, kept; a NaN wins.

    Their bits are compared: what a vector unit's own maximum makes of a NaN is its maker's
    business.
    """
    bits = jnp.max(magnitude_bits(wide), axis=tuple(axes), keepdims=True)
    return lax.bitcast_convert_type(bits, F32)


def _quantized_type(batch: int, rows: int, cols: int, cast: CastConfig) -> tuple[Any, Any]:
    block_rows, block_cols = block_of(cast)
    blocks = cols // block_cols
    scales = (rows // block_rows, blocks, 1, 1) if block_rows > 1 else (blocks, rows, 1)
    values = _typed((batch, rows, cols), cast.out_dtype.dtype)
    return values, _typed((batch, *scales), F32)


def _quantized_specs(tile: tuple[int, int], cast: CastConfig, place: Any) -> tuple[Any, Any]:
    """Return the block specs of a tile and its factors; ``place`` gives batch, row and column."""
    block_rows, block_cols = block_of(cast)
    values = pl.BlockSpec((None, *tile), place)
    blocks = tile[1] // block_cols
    if block_rows > 1:
        shape = (None, tile[0] // block_rows, blocks, 1, 1)
        return values, pl.BlockSpec(shape, lambda *at: (*place(*at), 0, 0))

    def by_column(*at: Any) -> tuple[Any, ...]:
        b, i, j = place(*at)
        return b, j, i, 0

    return values, pl.BlockSpec((None, blocks, tile[0], 1), by_column)


def _scale_matrix(scales: Any, cast: CastConfig) -> jax.Array:
    """Return the scale factors as (batch, row blocks, column blocks)."""
    return scales[..., 0, 0] if block_of(cast)[0] > 1 else scales[..., 0].mT


def _typed(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _params(config: KernelConfig, axes: Axes) -> Any:
    """Return the compiler parameters, with the kernel's own semantics where none are given."""
    params = config.tpu or tpu_params()
    return params.replace(dimension_semantics=semantics_in_force("tpu", config, axes))
