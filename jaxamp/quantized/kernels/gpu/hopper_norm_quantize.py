"""``norm_quantize`` in Mosaic GPU: the columns are gone over twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxamp.core.formats import CastConfig
from jaxamp.kernels.config import KernelConfig
from jaxamp.kernels.params import mosaic_gpu
from jaxamp.quantized.kernels.gpu.launch import default_stream_params, for_each, on_grid, parted
from jaxamp.quantized.kernels.gpu.quantized import quantized_type, scale_matrix, store, write_rows
from jaxamp.quantized.kernels.gpu.tiles import F32, load, over_columns, over_rows, swizzled
from jaxamp.quantized.kernels.tile_checks import Axes, block_of

Moments = tuple[Any, Any]
"""For each row of a tile its mean, and the sum of squared distances from it."""

Sweep = Callable[..., Any]
"""Calls a body with each tile of the columns: of the first so many operands, with a carry."""


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
    """Normalize the rows of ``x``, shape (rows, columns), and quantize them.

    Goes over the columns twice: mean and power first, merged tile by tile, then the values.
    """
    rows, cols = x.shape
    params = config.gpu or default_stream_params()
    grid, loop = parted({"rows": rows // tile[0]}, axes, config)
    norm = _Norm(cols, center, eps, cast, tile)

    def body(fixed: Mapping[str, Any], *refs: Any) -> None:
        ins, outs, scratch = refs[:3], refs[3:5], refs[5:]

        def step(at: Mapping[str, Any]) -> None:
            row = {**fixed, **at}["rows"]
            sweep = _sweep_of(row, ins, norm, params.max_concurrent_steps, config.delay_release)
            norm.write(norm.scaling(sweep), row, sweep, outs, scratch)

        for_each(loop, step)
        mosaic_gpu().wait_smem_to_gmem(0)

    out_type, scratch = quantized_type(1, rows, cols, tile, cast)
    operands = x, weight.astype(F32), bias.astype(F32)
    values, scales = on_grid(
        body, operands, out_type, scratch, grid=grid, params=params, interpret=interpret
    )
    return [values[0], scale_matrix(scales, cast)[0]]


def _sweep_of(row: Any, refs: Sequence[Any], norm: _Norm, steps: int, delay_release: int) -> Sweep:
    """Go over the columns of one tile's rows, and of weight and bias beside them."""
    plgpu, (tm, tn) = mosaic_gpu(), norm.tile
    pieces = swizzled(block_of(norm.cast)[1], refs[0].dtype)
    specs = [
        plgpu.BlockSpec(
            (tm, tn), lambda s: (row, s), transforms=pieces, delay_release=delay_release
        ),
        *[plgpu.BlockSpec((tn,), lambda s: (s,), delay_release=delay_release)] * 2,
    ]

    def sweep(body: Callable[..., Any], operands: int, carry: Any = None) -> Any:
        return plgpu.emit_pipeline(
            body,
            grid=(norm.cols // tn,),
            in_specs=specs[:operands],
            max_concurrent_steps=steps,
            init_carry=carry,
        )(*refs[:operands])

    return sweep


@dataclasses.dataclass(frozen=True)
class _Norm:
    """A norm of rows of ``cols`` numbers, a tile at a time."""

    cols: int
    center: bool
    eps: float
    cast: CastConfig
    tile: tuple[int, int]

    def scaling(self, sweep: Sweep) -> Moments:
        """Return each row's mean and the reciprocal of its standard deviation."""
        layout = mosaic_gpu().Layout.WGMMA.reduce(1)
        zero = mosaic_gpu().layout_cast(jnp.zeros((self.tile[0],), F32), layout)

        def merge(place: Any, x_s: Any, moments: Moments) -> Moments:
            return self._merged(moments, place[0], x_s)

        mean, squares = sweep(merge, 1, (zero, zero))
        return mean, lax.rsqrt(squares * np.float32(1 / self.cols) + np.float32(self.eps))

    def _merged(self, moments: Moments, column: Any, x_s: Any) -> Moments:
        """Merge one tile into the moments (Chan, Golub, LeVeque 1983)."""
        (mean, squares), width = moments, self.tile[1]
        wide = load(x_s, (slice(None),), mosaic_gpu().Layout.WGMMA).astype(F32)
        if not self.center:
            return mean, squares + jnp.sum(wide * wide, axis=1)
        before = (column * width).astype(F32)
        own_mean = jnp.sum(wide, axis=1) * np.float32(1 / width)
        far = wide - over_rows(own_mean, width)
        share = np.float32(width) / (before + np.float32(width))
        apart = own_mean - mean
        squares += jnp.sum(far * far, axis=1) + apart * apart * (before * share)
        return mean + apart * share, squares

    def write(
        self, scaling: Moments, row: Any, sweep: Sweep, outs: Sequence[Any], scratch: Sequence[Any]
    ) -> None:
        """Normalize, quantize and store each tile of the rows."""
        plgpu = mosaic_gpu()

        def one(place: Any, *tiles: Any) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._quantize(scaling, tiles, scratch)
            plgpu.commit_smem()
            store(scratch, outs, 0, row, place[0], self.tile, self.cast)

        sweep(one, 3)

    def _quantize(self, scaling: Moments, tiles: Sequence[Any], scratch: Sequence[Any]) -> None:
        """Write one tile's values and factors to shared memory."""
        (mean, inverse), (x_s, weight_s, bias_s) = scaling, tiles
        rows, cols = self.tile
        layout = mosaic_gpu().Layout.WGMMA
        width = block_of(self.cast)[1]
        for piece in range(cols // width):
            cut = pl.ds(piece * width, width)
            wide = load(x_s, (slice(None), cut), layout).astype(F32)
            normal = (wide - over_rows(mean, width)) * over_rows(inverse, width)
            scaled = normal * over_columns(load(weight_s, (cut,), layout.reduce(0)), rows)
            shifted = scaled + over_columns(load(bias_s, (cut,), layout.reduce(0)), rows)
            write_rows(shifted, scratch, slice(None), piece, self.cast)
