"""``block_quantize`` in Mosaic GPU: a tile is read once, for its rows and for its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxamp.core.formats import CastConfig
from jaxamp.kernels.config import KernelConfig
from jaxamp.kernels.params import mosaic_gpu
from jaxamp.quantized.kernels.gpu.launch import launch
from jaxamp.quantized.kernels.gpu.quantized import (
    as_float,
    magnitude,
    quantized_type,
    scale_matrix,
    store,
    write_rows,
)
from jaxamp.quantized.kernels.gpu.tiles import F32, ROWS, load, over_columns
from jaxamp.quantized.kernels.tile_checks import Axes, block_of
from jaxamp.quantized.lowp.arithmetic import encode, reciprocal, scale_factor


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
    plgpu = mosaic_gpu()
    batch, rows, cols = x.shape
    tm, tn = tile
    sizes = {"batch": batch, "rows": rows // tm, "columns": cols // tn}

    def step(
        at: Mapping[str, Any], tiles: Sequence[Any], outs: Sequence[Any], scratch: Any
    ) -> None:
        (x_s,) = tiles
        b, i, j = at["batch"], at["rows"], at["columns"]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _quantize_rows(x_s, scratch[0], scratch[1], cast)
        if transposed:
            _quantize_columns(x_s, scratch[2], scratch[3], cast)
        plgpu.commit_smem()
        store(scratch[:2], outs[:2], b, i, j, (tm, tn), cast)
        if transposed:
            store(scratch[2:], outs[2:], b, j, i, (tn, tm), cast)

    out_type, scratch = quantized_type(batch, rows, cols, tile, cast)
    if transposed:
        more_out, more_scratch = quantized_type(batch, cols, rows, (tn, tm), cast, plain=True)
        out_type, scratch = out_type + more_out, scratch + more_scratch
    outs = launch(
        step,
        [x],
        sizes=sizes,
        in_specs=[(tile, lambda at: (at["batch"], at["rows"], at["columns"]), block_of(cast)[1])],
        out_type=out_type,
        scratch=scratch,
        axes=axes,
        config=config,
        interpret=interpret,
    )
    return [scale_matrix(out, cast) if index % 2 else out for index, out in enumerate(outs)]


def _quantize_rows(x_s: Any, values_s: Any, scale_s: Any, cast: CastConfig) -> None:
    """Quantize a tile of shared memory in blocks of its rows."""
    plgpu = mosaic_gpu()
    block_rows, block_cols = block_of(cast)
    rows, cols = x_s.shape
    row = plgpu.Layout.WGMMA.reduce(1)
    height = max(block_rows, ROWS)
    for j in range(cols // block_cols):
        for top in range(0, rows, height):
            halves = [pl.ds(top + start, ROWS) for start in range(0, height, ROWS)]
            cut = pl.ds(j * block_cols, block_cols)
            wides = [load(x_s, (half, cut), plgpu.Layout.WGMMA).astype(F32) for half in halves]
            rows_amax = [magnitude(wide, 1) for wide in wides]
            whole = _everywhere(_largest(rows_amax), row) if block_rows > 1 else None
            for half, wide in zip(halves, wides, strict=True):
                write_rows(wide, (values_s, scale_s), half, j, cast, whole)


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
            wides = [load(x_s, (half, cut), layout).astype(F32) for half in halves]
            amax = _largest([magnitude(wide, 0) for wide in wides])
            amax = _everywhere(amax, layout.reduce(0)) if block_rows > 1 else amax
            scale = scale_factor(as_float(amax), cast.out_dtype, round_up=cast.round_sf)
            inverse = reciprocal(scale, is_power=cast.round_sf)
            scale_s[block, cut] = scale
            for half, wide in zip(halves, wides, strict=True):
                over, inverse_over = (
                    plgpu.layout_cast(over_columns(factor, ROWS), layout)
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


def _largest(magnitudes: Sequence[Any]) -> Any:
    largest = magnitudes[0]
    for other in magnitudes[1:]:
        largest = jnp.maximum(largest, other)
    return largest


def _everywhere(magnitudes: Any, layout: Any) -> Any:
    """Return the largest of a vector, in its place."""
    over_all = lax.broadcast_in_dim(jnp.max(magnitudes), magnitudes.shape, ())
    return mosaic_gpu().layout_cast(over_all, layout)
