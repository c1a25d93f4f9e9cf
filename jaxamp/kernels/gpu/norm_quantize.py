"""``norm_quantize`` in Mosaic GPU: the columns are gone over twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxamp.formats import CastConfig
from jaxamp.kernels.checks import Axes
from jaxamp.kernels.config import KernelConfig
from jaxamp.kernels.gpu.launch import default_stream_params, for_each, own_fields, parted
from jaxamp.kernels.gpu.quantized import block_of, quantized_type, scale_matrix, store, write_rows
from jaxamp.kernels.gpu.tiles import F32, load, over_columns, over_rows, swizzled
from jaxamp.kernels.params import mosaic_gpu


def norm_quantize(
    x: Any,
    weight: Any,
    bias: Any,
    *,
    cast: CastConfig,
    center: bool,
    eps: float,
    tile: tuple[int, int],
    axes: Axes,
    config: KernelConfig,
    interpret: Any,
) -> list[Any]:
    """Normalizes the rows of ``x``, shape (rows, columns), and quantizes them.

    Goes over the columns twice: mean and power first, merged tile by tile, then the values.
    """
    plgpu = mosaic_gpu()
    rows, cols = x.shape
    tm, tn = tile
    row_layout = plgpu.Layout.WGMMA.reduce(1)

    def spread(carry: tuple[Any, Any], at: Mapping[str, Any], tiles: Sequence[Any]) -> Any:
        """Merges one tile into mean and sum of squared distances (Chan, Golub, LeVeque 1983)."""
        mean, squares = carry
        wide = load(tiles[0], (slice(None),), plgpu.Layout.WGMMA).astype(F32)
        if not center:
            return mean, squares + jnp.sum(wide * wide, axis=1)
        before = (at["columns"] * tn).astype(F32)
        own_mean = jnp.sum(wide, axis=1) * np.float32(1 / tn)
        far = wide - over_rows(own_mean, tn)
        share = np.float32(tn) / (before + np.float32(tn))
        apart = own_mean - mean
        squares += jnp.sum(far * far, axis=1) + apart * apart * (before * share)
        return mean + apart * share, squares

    def emit(stats: tuple[Any, Any], tiles: Sequence[Any], scratch: Sequence[Any]) -> None:
        mean, inverse = stats
        x_s, weight_s, bias_s = tiles
        col_layout = plgpu.Layout.WGMMA.reduce(0)
        block_cols = block_of(cast)[1]
        for piece in range(tn // block_cols):
            cut = pl.ds(piece * block_cols, block_cols)
            wide = load(x_s, (slice(None), cut), plgpu.Layout.WGMMA).astype(F32)
            normal = (wide - over_rows(mean, block_cols)) * over_rows(inverse, block_cols)
            scaled = normal * over_columns(load(weight_s, (cut,), col_layout), tm)
            shifted = scaled + over_columns(load(bias_s, (cut,), col_layout), tm)
            write_rows(shifted, scratch, slice(None), piece, cast)

    def step(at: Mapping[str, Any], ins: Sequence[Any], outs: Sequence[Any], scratch: Any) -> None:
        x_ref, weight_ref, bias_ref = ins

        def pipeline(body: Any, names: int, carry: Any = None) -> Any:
            specs = [
                plgpu.BlockSpec(
                    (tm, tn),
                    lambda s: (at["rows"], s),
                    transforms=swizzled(block_of(cast)[1], x.dtype),
                    delay_release=config.delay_release,
                ),
                *[plgpu.BlockSpec((tn,), lambda s: (s,), delay_release=config.delay_release)] * 2,
            ]
            return plgpu.emit_pipeline(
                body,
                grid=(cols // tn,),
                in_specs=specs[:names],
                max_concurrent_steps=params.max_concurrent_steps,
                init_carry=carry,
            )(*(x_ref, weight_ref, bias_ref)[:names])

        def first(place: Any, x_s: Any, carry: Any) -> Any:
            return spread(carry, {"columns": place[0]}, [x_s])

        def second(place: Any, *tiles: Any) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            emit((mean, inverse), tiles, scratch)
            plgpu.commit_smem()
            store(scratch, outs, 0, at["rows"], place[0], (tm, tn), cast)

        zero = plgpu.layout_cast(jnp.zeros((tm,), F32), row_layout)
        mean, squares = pipeline(first, 1, (zero, zero))
        inverse = lax.rsqrt(squares * np.float32(1 / cols) + np.float32(eps))
        pipeline(second, 3)

    params = config.gpu or default_stream_params()
    grid, loop = parted({"rows": rows // tm}, axes, config)

    def body(*refs: Any) -> None:
        ins, outs, scratch = refs[:3], refs[3:5], refs[5:]
        fixed = {name: lax.axis_index(name) for name in grid}
        for_each(loop, lambda at: step(fixed | at, ins, outs, scratch))
        plgpu.wait_smem_to_gmem(0)

    out_type, scratch_types = quantized_type(1, rows, cols, tile, cast)
    values, scales = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=own_fields(params),
        interpret=interpret or None,
    )(x, weight.astype(F32), bias.astype(F32))
    return [values[0], scale_matrix(scales, cast)[0]]
