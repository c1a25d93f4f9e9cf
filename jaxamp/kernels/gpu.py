"""The kernels in Mosaic GPU, for Hopper. All use of that unsteady interface is in this file.

Values are held as the tensor core's accumulators are, ``Layout.WGMMA``: 64 rows over the 128
threads of a warpgroup, so that a reduction along a row stays within four threads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxamp import _compat
from jaxamp.errors import KernelError
from jaxamp.formats import CastConfig
from jaxamp.kernels.checks import Axes, semantics_in_force
from jaxamp.kernels.config import KernelConfig
from jaxamp.kernels.params import gpu_params, mosaic_gpu
from jaxamp.lowp.arithmetic import encode, reciprocal, scale_factor

F32 = np.dtype(np.float32)
ROWS = 64  # of the WGMMA layout
_MAGNITUDE = 0x7FFFFFFF
_MEMORY_REGISTERS = 40  # for the warpgroup that only copies

Place = Callable[[Mapping[str, Any]], tuple[Any, ...]]


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
    """Quantizes ``x`` of shape (batch, rows, columns), all multiples of the tile."""
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
        _store(scratch[:2], outs[:2], b, i, j, (tm, tn), cast)
        if transposed:
            _store(scratch[2:], outs[2:], b, j, i, (tn, tm), cast)

    out_type, scratch = _quantized_type(batch, rows, cols, tile, cast)
    if transposed:
        more_out, more_scratch = _quantized_type(batch, cols, rows, (tn, tm), cast, plain=True)
        out_type, scratch = out_type + more_out, scratch + more_scratch
    outs = _launch(
        step,
        [x],
        sizes=sizes,
        in_specs=[(tile, lambda at: (at["batch"], at["rows"], at["columns"]), _block(cast)[1])],
        out_type=out_type,
        scratch=scratch,
        axes=axes,
        config=config,
        interpret=interpret,
    )
    return [_scale_matrix(out, cast) if index % 2 else out for index, out in enumerate(outs)]


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
    """Multiplies (batch, M, K) with (batch, N, K); factors (batch, M, K blocks), likewise for N.

    Two warpgroups compute and one copies. Each block of the contraction goes through the tensor
    core into a fresh accumulator and is added to the sum in float32, with its factors: the tensor
    core's own accumulator keeps fewer bits.
    """
    plgpu = mosaic_gpu()
    (batch, m, k), n = a.shape, b.shape[1]
    tm, tn, tk = tile
    warpgroups = 2 if tm % (2 * ROWS) == 0 else 1
    part = tm // warpgroups
    params = config.gpu or default_matmul_params()
    words = dict(zip(axes, semantics_in_force("gpu", config, axes), strict=True))
    sizes = {"batch": batch, "rows": m // tm, "columns": n // tn}
    grid = {name: size for name, size in sizes.items() if words[name] == "parallel"}
    loop = {name: size for name, size in sizes.items() if words[name] != "parallel"}
    swizzled = _swizzled(tk, a.dtype)

    def tile_product(at: Mapping[str, Any], refs: Sequence[Any], out_ref: Any, out_s: Any) -> None:
        group = lax.axis_index("warpgroup")
        own = pl.ds(group * part, part)
        a_ref, sa_ref, b_ref, sb_ref = (ref.at[at["batch"]] for ref in refs)

        def compute(run: Callable[[Any], Any]) -> None:
            zero = plgpu.layout_cast(jnp.zeros((part, tn), F32), plgpu.Layout.WGMMA)
            total = run(zero)
            out_s[own] = total.astype(out_dtype)
            plgpu.commit_smem()
            rows = pl.ds(at["rows"] * tm + group * part, part)
            cols = pl.ds(at["columns"] * tn, tn)
            plgpu.copy_smem_to_gmem(out_s.at[own], out_ref.at[at["batch"]].at[rows, cols])
            plgpu.wait_smem_to_gmem(0)

        def step(_: Any, a_s: Any, sa_s: Any, b_s: Any, sb_s: Any, total: Any) -> Any:
            def product(acc: Any) -> Any:
                plgpu.wgmma(acc, a_s.at[own], b_s.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                return acc[...]

            block = pl.run_scoped(product, plgpu.ACC((part, tn), F32))
            by_row = _load(sa_s, (0, own), plgpu.Layout.WGMMA.reduce(1))
            by_col = _load(sb_s, (0,), plgpu.Layout.WGMMA.reduce(0))
            return total + block * _over_rows(by_row, tn) * _over_columns(by_col, part)

        def spec(shape: tuple[int, int], place: Any, transforms: tuple[Any, ...] = ()) -> Any:
            return plgpu.BlockSpec(
                shape, place, transforms=transforms, delay_release=config.delay_release
            )

        i, j = at["rows"], at["columns"]
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(k // tk,),
            in_specs=[
                spec((tm, tk), lambda s: (i, s), swizzled),
                spec((1, tm), lambda s: (s, i)),
                spec((tn, tk), lambda s: (j, s), swizzled),
                spec((1, tn), lambda s: (s, j)),
            ],
            max_concurrent_steps=params.max_concurrent_steps,
            memory_registers=_MEMORY_REGISTERS,
            wg_axis="warpgroup",
            num_compute_wgs=warpgroups,
            compute_context=compute,
        )(a_ref, sa_ref, b_ref, sb_ref)

    def body(*refs: Any) -> None:
        *ins, out_ref, out_s = refs
        fixed = {name: lax.axis_index(name) for name in grid}
        _for_each(loop, lambda at: tile_product(fixed | at, ins, out_ref, out_s))

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, m, n), out_dtype),
        scratch_types=[plgpu.SMEM((tm, tn), out_dtype, transforms=_swizzled(tn, out_dtype))],
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=_own_fields(params),
        interpret=interpret or None,
    )(a, a_scale.mT, b, b_scale.mT)
    return [out]


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
        wide = _load(tiles[0], (slice(None),), plgpu.Layout.WGMMA).astype(F32)
        if not center:
            return mean, squares + jnp.sum(wide * wide, axis=1)
        before = (at["columns"] * tn).astype(F32)
        own_mean = jnp.sum(wide, axis=1) * np.float32(1 / tn)
        far = wide - _over_rows(own_mean, tn)
        share = np.float32(tn) / (before + np.float32(tn))
        apart = own_mean - mean
        squares += jnp.sum(far * far, axis=1) + apart * apart * (before * share)
        return mean + apart * share, squares

    def emit(stats: tuple[Any, Any], tiles: Sequence[Any], scratch: Sequence[Any]) -> None:
        mean, inverse = stats
        x_s, weight_s, bias_s = tiles
        col_layout = plgpu.Layout.WGMMA.reduce(0)
        block_cols = _block(cast)[1]
        for piece in range(tn // block_cols):
            cut = pl.ds(piece * block_cols, block_cols)
            wide = _load(x_s, (slice(None), cut), plgpu.Layout.WGMMA).astype(F32)
            normal = (wide - _over_rows(mean, block_cols)) * _over_rows(inverse, block_cols)
            scaled = normal * _over_columns(_load(weight_s, (cut,), col_layout), tm)
            shifted = scaled + _over_columns(_load(bias_s, (cut,), col_layout), tm)
            _write_rows(shifted, scratch, slice(None), piece, cast)

    def step(at: Mapping[str, Any], ins: Sequence[Any], outs: Sequence[Any], scratch: Any) -> None:
        x_ref, weight_ref, bias_ref = ins

        def pipeline(body: Any, names: int, carry: Any = None) -> Any:
            specs = [
                plgpu.BlockSpec(
                    (tm, tn),
                    lambda s: (at["rows"], s),
                    transforms=_swizzled(_block(cast)[1], x.dtype),
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
            _store(scratch, outs, 0, at["rows"], place[0], (tm, tn), cast)

        zero = plgpu.layout_cast(jnp.zeros((tm,), F32), row_layout)
        mean, squares = pipeline(first, 1, (zero, zero))
        inverse = lax.rsqrt(squares * np.float32(1 / cols) + np.float32(eps))
        pipeline(second, 3)

    params = config.gpu or default_stream_params()
    words = dict(zip(axes, semantics_in_force("gpu", config, axes), strict=True))
    count = {"rows": rows // tm}
    grid, loop = (count, {}) if words["rows"] == "parallel" else ({}, count)

    def body(*refs: Any) -> None:
        ins, outs, scratch = refs[:3], refs[3:5], refs[5:]
        fixed = {name: lax.axis_index(name) for name in grid}
        _for_each(loop, lambda at: step(fixed | at, ins, outs, scratch))
        plgpu.wait_smem_to_gmem(0)

    out_type, scratch_types = _quantized_type(1, rows, cols, tile, cast)
    values, scales = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=_own_fields(params),
        interpret=interpret or None,
    )(x, weight.astype(F32), bias.astype(F32))
    return [values[0], _scale_matrix(scales, cast)[0]]


def default_matmul_params() -> Any:
    """Four steps in flight, and the semantics that both JAX versions compile alike."""
    return gpu_params(max_concurrent_steps=4, lowering_semantics="lane")


def default_stream_params() -> Any:
    """For kernels that go over memory once."""
    return gpu_params(max_concurrent_steps=2, lowering_semantics="lane")


def _launch(
    step: Callable[..., None],
    operands: Sequence[Any],
    *,
    sizes: Mapping[str, int],
    in_specs: Sequence[tuple[tuple[int, ...], Place, int]],
    out_type: Sequence[Any],
    scratch: Sequence[Any],
    axes: Axes,
    config: KernelConfig,
    interpret: Any,
) -> Sequence[Any]:
    """Runs ``step`` over a grid: parallel axes by many programs, sequential ones by a pipeline.

    Args:
      step: gets the place on each axis, the tiles of the operands, the outputs and the scratch.
      operands: arrays with a leading batch axis.
      sizes: of the axes of the grid.
      in_specs: for each operand its tile, its place, and the width of the pieces that are read.
      out_type: shapes and dtypes of the outputs.
      scratch: what a program needs in shared memory.
      axes: which of the axes may run in any order.
      config: the configuration.
      interpret: what Pallas is told about interpreting.
    """
    plgpu = mosaic_gpu()
    params = config.gpu or default_stream_params()
    words = dict(zip(axes, semantics_in_force("gpu", config, axes), strict=True))
    grid = {name: size for name, size in sizes.items() if words[name] == "parallel"}
    loop = {name: size for name, size in sizes.items() if words[name] != "parallel"}

    def body(*refs: Any) -> None:
        ins, rest = refs[: len(operands)], refs[len(operands) :]
        outs, own = rest[: len(out_type)], rest[len(out_type) :]
        fixed = {name: lax.axis_index(name) for name in grid}

        def at(place: Sequence[Any]) -> dict[str, Any]:
            return fixed | dict(zip(loop, place, strict=False))

        def one(place: Sequence[Any], *tiles: Any) -> None:
            step(at(place), tiles, outs, own)

        def spec(operand: Any, tile: tuple[int, ...], place: Place, width: int) -> Any:
            return plgpu.BlockSpec(
                (None, *tile),
                lambda *where: place(at(where)),
                transforms=_swizzled(width, operand.dtype),
                delay_release=config.delay_release,
            )

        plgpu.emit_pipeline(
            one,
            grid=tuple(loop.values()) or (1,),
            in_specs=[spec(x, *given) for x, given in zip(operands, in_specs, strict=True)],
            max_concurrent_steps=params.max_concurrent_steps,
        )(*ins)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=list(out_type),
        scratch_types=list(scratch),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=_own_fields(params),
        interpret=interpret or None,
    )(*operands)


def _own_fields(params: Any) -> Any:
    """What ``plgpu.kernel`` reads itself; grid and pipeline are made here."""
    if params.profile_space and _compat.cuda_capability() is None:
        raise KernelError(
            f"profile_dir={params.profile_dir!r}: a profile is written by the process that runs "
            "the kernel; it can be asked for only where there is a GPU."
        )
    return dataclasses.replace(params, dimension_semantics=None, max_concurrent_steps=1)


def _for_each(loop: Mapping[str, int], body: Callable[[dict[str, Any]], None]) -> None:
    """Calls ``body`` with every place on the axes of a loop, in order."""
    if not loop:
        return body({})

    def run(index: Any, _: None) -> None:
        place: dict[str, Any] = {}
        for name, size in reversed(list(loop.items())):
            place[name], index = lax.rem(index, size), lax.div(index, size)
        body(place)

    return lax.fori_loop(0, int(np.prod(list(loop.values()))), run, None)


def _quantize_rows(x_s: Any, values_s: Any, scale_s: Any, cast: CastConfig) -> None:
    """Quantizes a tile of shared memory in blocks of its rows."""
    plgpu = mosaic_gpu()
    block_rows, block_cols = _block(cast)
    rows, cols = x_s.shape
    row = plgpu.Layout.WGMMA.reduce(1)
    height = max(block_rows, ROWS)
    for j in range(cols // block_cols):
        for top in range(0, rows, height):
            halves = [pl.ds(top + start, ROWS) for start in range(0, height, ROWS)]
            cut = pl.ds(j * block_cols, block_cols)
            wides = [_load(x_s, (half, cut), plgpu.Layout.WGMMA).astype(F32) for half in halves]
            rows_amax = [_magnitude(wide, 1) for wide in wides]
            whole = _everywhere(_largest(rows_amax), row) if block_rows > 1 else None
            for half, wide in zip(halves, wides, strict=True):
                _write_rows(wide, (values_s, scale_s), half, j, cast, whole)


def _write_rows(
    wide: Any, scratch: Sequence[Any], rows: Any, block: int, cast: CastConfig, amax: Any = None
) -> None:
    """Writes values and factors of 64 rows of one column block."""
    values_s, scale_s = scratch
    cols = wide.shape[1]
    amax = _magnitude(wide, 1) if amax is None else amax
    scale = scale_factor(_as_float(amax), cast.out_dtype, round_up=cast.round_sf)
    inverse = reciprocal(scale, is_power=cast.round_sf)
    codes = encode(wide, _over_rows(scale, cols), _over_rows(inverse, cols), cast.out_dtype)
    values_s[rows, pl.ds(block * cols, cols)] = codes
    scale_s[block, rows] = scale


def _quantize_columns(x_s: Any, values_s: Any, scale_s: Any, cast: CastConfig) -> None:
    """Quantizes the transpose of a tile of shared memory in blocks of its columns."""
    plgpu, layout = mosaic_gpu(), _one_by_one()
    block_rows, block_cols = _block(cast)
    rows, cols = x_s.shape
    width = min(cols, 2 * ROWS if block_rows > 1 else ROWS)
    for left in range(0, cols, width):
        cut = pl.ds(left, width)
        for block in range(rows // block_cols):
            tops = range(block * block_cols, (block + 1) * block_cols, ROWS)
            halves = [pl.ds(top, ROWS) for top in tops]
            wides = [_load(x_s, (half, cut), layout).astype(F32) for half in halves]
            amax = _largest([_magnitude(wide, 0) for wide in wides])
            amax = _everywhere(amax, layout.reduce(0)) if block_rows > 1 else amax
            scale = scale_factor(_as_float(amax), cast.out_dtype, round_up=cast.round_sf)
            inverse = reciprocal(scale, is_power=cast.round_sf)
            scale_s[block, cut] = scale
            for half, wide in zip(halves, wides, strict=True):
                over, inverse_over = (
                    plgpu.layout_cast(_over_columns(factor, ROWS), layout)
                    for factor in (scale, inverse)
                )
                values_s.transpose((1, 0))[half, cut] = encode(
                    wide, over, inverse_over, cast.out_dtype
                )


def _one_by_one() -> Any:
    """As ``Layout.WGMMA`` but for pairs of neighbours, which a transposed copy parts."""
    plgpu = mosaic_gpu()
    tiling = plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-8,), lane_dims=(-4, -3), vector_dim=-1)


def _largest(magnitudes: Sequence[Any]) -> Any:
    largest = magnitudes[0]
    for other in magnitudes[1:]:
        largest = jnp.maximum(largest, other)
    return largest


def _everywhere(magnitudes: Any, layout: Any) -> Any:
    """The largest of a vector, in its place."""
    over_all = lax.broadcast_in_dim(jnp.max(magnitudes), magnitudes.shape, ())
    return mosaic_gpu().layout_cast(over_all, layout)


def _magnitude(wide: Any, axis: int) -> Any:
    """The bits of the largest magnitude along an axis: they order as the numbers do, NaN last."""
    return jnp.max(lax.bitcast_convert_type(wide, np.int32) & np.int32(_MAGNITUDE), axis=axis)


def _as_float(bits: Any) -> Any:
    return lax.bitcast_convert_type(bits, F32)


def _over_rows(by_row: Any, cols: int) -> Any:
    return lax.broadcast_in_dim(by_row, (by_row.shape[0], cols), (0,))


def _over_columns(by_col: Any, rows: int) -> Any:
    return lax.broadcast_in_dim(by_col, (rows, by_col.shape[0]), (1,))


def _load(ref: Any, index: Any, layout: Any) -> Any:
    part = _compat.indexed_for_load(ref, index)
    return mosaic_gpu().load(*part, layout=layout, optimized=False)


def _store(
    scratch: Sequence[Any],
    outs: Sequence[Any],
    batch: Any,
    row: Any,
    col: Any,
    tile: tuple[int, int],
    cast: CastConfig,
) -> None:
    """Starts the copy of a quantized tile and its factors to the outputs."""
    plgpu = mosaic_gpu()
    rows = pl.ds(row * tile[0], tile[0])
    blocks = tile[1] // _block(cast)[1]
    values, scales = (out.at[batch] for out in outs)
    plgpu.copy_smem_to_gmem(scratch[0], values.at[rows, pl.ds(col * tile[1], tile[1])])
    plgpu.copy_smem_to_gmem(scratch[1], scales.at[pl.ds(col * blocks, blocks), rows])


def _quantized_type(
    batch: int,
    rows: int,
    cols: int,
    tile: tuple[int, int],
    cast: CastConfig,
    *,
    plain: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Outputs of a quantization, and what one tile of them takes in shared memory.

    Factors are stored for every row, column blocks first: so a tile's part is contiguous.
    """
    plgpu = mosaic_gpu()
    block_cols = _block(cast)[1]
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


def _scale_matrix(scales: Any, cast: CastConfig) -> jax.Array:
    """Scale factors as (batch, row blocks, column blocks)."""
    return scales.mT[:, :: _block(cast)[0]]


def _swizzled(width: int, dtype: Any) -> tuple[Any, ...]:
    """How a tile lies in shared memory without bank conflicts, if read in pieces of this width."""
    plgpu = mosaic_gpu()
    size = np.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(width * size * 8)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def _block(cast: CastConfig) -> tuple[int, int]:
    assert cast.sf_block is not None  # the public functions have seen to it
    return cast.sf_block
