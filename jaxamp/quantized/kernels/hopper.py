"""``block_quantize`` in Mosaic GPU, for Hopper: a tile is read once, for its rows and columns.

All use of that unsteady interface is here. Values are held as the tensor core's accumulators are,
``Layout.WGMMA``: 64 rows over the 128 threads of a warpgroup, so that a reduction along a row stays
within four threads. ``plgpu.kernel`` makes neither a grid of parallel axes nor a pipeline over the
others, so both are made here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxamp.core import jax_compat
from jaxamp.core.formats import CastConfig
from jaxamp.errors import KernelError
from jaxamp.kernels.config import KernelConfig
from jaxamp.kernels.params import gpu_params, mosaic_gpu
from jaxamp.kernels.target_gpu import gpu_at_hand
from jaxamp.quantized.kernels.fit import AXES, block_of, semantics_in_force
from jaxamp.quantized.lowp.arithmetic import encode, magnitude_bits, scales_of

F32 = np.dtype(np.float32)
ROWS = 64  # of the WGMMA layout


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
    plgpu = mosaic_gpu()
    # Two steps in flight, and semantics that both JAX versions compile alike.
    params = config.gpu or gpu_params(max_concurrent_steps=2, lowering_semantics="lane")
    (batch, rows, cols), (tm, tn) = x.shape, tile
    sizes = dict(zip(AXES, (batch, rows // tm, cols // tn), strict=True))
    words = dict(zip(AXES, semantics_in_force("gpu", config), strict=True))
    grid = {name: size for name, size in sizes.items() if words[name] == "parallel"}
    loop = {name: size for name, size in sizes.items() if name not in grid}
    out_type, scratch = _quantized_type(x.shape, tile, cast)
    if transposed:
        turned = batch, cols, rows
        more_out, more_scratch = _quantized_type(turned, (tn, tm), cast, plain=True)
        out_type, scratch = out_type + more_out, scratch + more_scratch

    def body(x_ref: Any, *refs: Any) -> None:
        outs, own = refs[: len(out_type)], refs[len(out_type) :]
        fixed = {name: lax.axis_index(name) for name in grid}

        def at(place: Sequence[Any]) -> tuple[Any, ...]:
            whole = {**fixed, **dict(zip(loop, place, strict=False))}
            return tuple(whole[name] for name in AXES)

        def step(place: Sequence[Any], x_s: Any) -> None:
            b, i, j = at(place)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            _quantize_rows(x_s, own[0], own[1], cast)
            if transposed:
                _quantize_columns(x_s, own[2], own[3], cast)
            plgpu.commit_smem()
            _store(own[:2], outs[:2], (b, i, j), cast)
            if transposed:
                _store(own[2:], outs[2:], (b, j, i), cast)

        spec = plgpu.BlockSpec(
            (None, *tile),
            lambda *place: at(place),
            transforms=_swizzled(block_of(cast)[1], x.dtype),
            delay_release=config.delay_release,
        )
        plgpu.emit_pipeline(
            step,
            grid=tuple(loop.values()) or (1,),
            in_specs=[spec],
            max_concurrent_steps=params.max_concurrent_steps,
        )(x_ref)
        plgpu.wait_smem_to_gmem(0)

    outs = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=_own_fields(params),
        interpret=interpret or None,
    )(x)
    return [_scale_matrix(out, cast) if index % 2 else out for index, out in enumerate(outs)]


def _own_fields(params: Any) -> Any:
    """Return the fields that ``plgpu.kernel`` reads itself; grid and pipeline are made here."""
    if params.profile_space and gpu_at_hand() is None:
        raise KernelError(
            f"profile_dir={params.profile_dir!r}: a profile is written by the process that runs "
            "the kernel; it can be asked for only where there is a GPU."
        )
    return dataclasses.replace(params, dimension_semantics=None, max_concurrent_steps=1)


def _quantized_type(
    sizes: Sequence[int], tile: tuple[int, int], cast: CastConfig, *, plain: bool = False
) -> tuple[list[Any], list[Any]]:
    """Return the outputs of a quantization, and what one tile of them takes in shared memory.

    Factors are stored for every row, column blocks first: so a tile's part is contiguous.
    """
    plgpu = mosaic_gpu()
    (batch, rows, cols), block_cols = sizes, block_of(cast)[1]
    dtype = cast.out_dtype.dtype
    out_type = [
        jax.ShapeDtypeStruct((batch, rows, cols), dtype),
        jax.ShapeDtypeStruct((batch, cols // block_cols, rows), F32),
    ]
    transforms = () if plain else _swizzled(block_cols, dtype)
    scratch = [
        plgpu.SMEM(tile, dtype, transforms=transforms),
        plgpu.SMEM((tile[1] // block_cols, tile[0]), F32),
    ]
    return out_type, scratch


def _quantize_rows(x_s: Any, values_s: Any, scale_s: Any, cast: CastConfig) -> None:
    """Quantize a tile of shared memory in blocks of its rows."""
    layout = mosaic_gpu().Layout.WGMMA
    block_rows, block_cols = block_of(cast)
    rows, cols = x_s.shape
    height = max(block_rows, ROWS)
    for j in range(cols // block_cols):
        for top in range(0, rows, height):
            halves = [pl.ds(top + start, ROWS) for start in range(0, height, ROWS)]
            cut = pl.ds(j * block_cols, block_cols)
            wides = [_load(x_s, (half, cut), layout) for half in halves]
            amaxes = [_magnitude(wide, 1) for wide in wides]
            if block_rows > 1:
                largest = functools.reduce(jnp.maximum, amaxes)
                amaxes = [_everywhere(largest, layout.reduce(1))] * len(amaxes)
            for half, wide, amax in zip(halves, wides, amaxes, strict=True):
                scale, inverse = scales_of(amax, cast)
                over, inverse_over = _over_rows(scale, block_cols), _over_rows(inverse, block_cols)
                values_s[half, cut] = encode(wide, over, inverse_over, cast.out_dtype)
                scale_s[j, half] = scale


def _quantize_columns(x_s: Any, values_s: Any, scale_s: Any, cast: CastConfig) -> None:
    """Quantize the transpose of a tile of shared memory in blocks of its columns."""
    plgpu, layout = mosaic_gpu(), _one_by_one()
    block_rows, block_cols = block_of(cast)
    rows, cols = x_s.shape
    width = min(cols, 2 * ROWS if block_rows > 1 else ROWS)
    for left in range(0, cols, width):
        cut = pl.ds(left, width)
        for block in range(rows // block_cols):
            tops = range(block * block_cols, (block + 1) * block_cols, ROWS)
            halves = [pl.ds(top, ROWS) for top in tops]
            wides = [_load(x_s, (half, cut), layout) for half in halves]
            amax = functools.reduce(jnp.maximum, [_magnitude(wide, 0) for wide in wides])
            amax = _everywhere(amax, layout.reduce(0)) if block_rows > 1 else amax
            scale, inverse = scales_of(amax, cast)
            scale_s[block, cut] = scale
            for half, wide in zip(halves, wides, strict=True):
                over, inverse_over = (
                    plgpu.layout_cast(lax.broadcast_in_dim(factor, (ROWS, width), (1,)), layout)
                    for factor in (scale, inverse)
                )
                values_s.transpose((1, 0))[half, cut] = encode(
                    wide, over, inverse_over, cast.out_dtype
                )


def _one_by_one() -> Any:
    """Return ``Layout.WGMMA`` without its pairs of neighbours, which a transposed copy splits."""
    plgpu = mosaic_gpu()
    tiling = plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-8,), lane_dims=(-4, -3), vector_dim=-1)


def _load(ref: Any, index: Any, layout: Any) -> Any:
    """Read part of a tile into registers, in float32."""
    part = jax_compat.indexed_for_load(ref, index)
    return mosaic_gpu().load(*part, layout=layout, optimized=False).astype(F32)


def _magnitude(wide: Any, axis: int) -> Any:
    """Return the bits of the largest magnitude along an axis."""
    return jnp.max(magnitude_bits(wide), axis=axis)


def _everywhere(magnitudes: Any, layout: Any) -> Any:
    """Return the largest of a vector, in its place."""
    over_all = lax.broadcast_in_dim(jnp.max(magnitudes), magnitudes.shape, ())
    return mosaic_gpu().layout_cast(over_all, layout)


def _over_rows(by_row: Any, cols: int) -> Any:
    return lax.broadcast_in_dim(by_row, (by_row.shape[0], cols), (0,))


def _swizzled(width: int, dtype: Any) -> tuple[Any, ...]:
    """Return the transforms of a tile in shared memory that avoid bank conflicts."""
    plgpu = mosaic_gpu()
    size = np.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(width * size * 8)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def _store(
    scratch: Sequence[Any], outs: Sequence[Any], at: Sequence[Any], cast: CastConfig
) -> None:
    """Start the copy of a quantized tile and its factors to their place in the outputs."""
    plgpu, (batch, row, col) = mosaic_gpu(), at
    height, width = scratch[0].shape
    rows, blocks = pl.ds(row * height, height), width // block_of(cast)[1]
    values, scales = (out.at[batch] for out in outs)
    plgpu.copy_smem_to_gmem(scratch[0], values.at[rows, pl.ds(col * width, width)])
    plgpu.copy_smem_to_gmem(scratch[1], scales.at[pl.ds(col * blocks, blocks), rows])


def _scale_matrix(scales: Any, cast: CastConfig) -> jax.Array:
    """Return the scale factors as (batch, row blocks, column blocks)."""
    return scales.mT[:, :: block_of(cast)[0]]
