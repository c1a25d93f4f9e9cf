"""Grids and pipelines over a kernel's axes, which ``plgpu.kernel`` does not make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from jaxamp.core import jax_compat
from jaxamp.errors import KernelError
from jaxamp.kernels.config import KernelConfig
from jaxamp.kernels.params import gpu_params, mosaic_gpu
from jaxamp.quantized.kernels.gpu.tiles import swizzled
from jaxamp.quantized.kernels.tile_checks import Axes, semantics_in_force

Place = Callable[[Mapping[str, Any]], tuple[Any, ...]]


def launch(
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
    """Run ``step`` over a grid: parallel axes by many programs, sequential ones by a pipeline.

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
    grid, loop = parted(sizes, axes, config)

    def body(fixed: Mapping[str, Any], *refs: Any) -> None:
        ins, rest = refs[: len(operands)], refs[len(operands) :]
        outs, own = rest[: len(out_type)], rest[len(out_type) :]

        def at(place: Sequence[Any]) -> dict[str, Any]:
            return {**fixed, **dict(zip(loop, place, strict=False))}

        def one(place: Sequence[Any], *tiles: Any) -> None:
            step(at(place), tiles, outs, own)

        def spec(operand: Any, tile: tuple[int, ...], place: Place, width: int) -> Any:
            return plgpu.BlockSpec(
                (None, *tile),
                lambda *where: place(at(where)),
                transforms=swizzled(width, operand.dtype),
                delay_release=config.delay_release,
            )

        plgpu.emit_pipeline(
            one,
            grid=tuple(loop.values()) or (1,),
            in_specs=[spec(x, *given) for x, given in zip(operands, in_specs, strict=True)],
            max_concurrent_steps=params.max_concurrent_steps,
        )(*ins)
        plgpu.wait_smem_to_gmem(0)

    return on_grid(body, operands, out_type, scratch, grid=grid, params=params, interpret=interpret)


def on_grid(
    program: Callable[..., None],
    operands: Sequence[Any],
    out_type: Sequence[Any],
    scratch: Sequence[Any],
    *,
    grid: Mapping[str, int],
    params: Any,
    interpret: Any,
    **threads: Any,
) -> Sequence[Any]:
    """Run ``program`` once for each place on the grid.

    It gets the place by the names of the axes, then operands, outputs and scratch in memory;
    ``threads`` says of how many warpgroups a program is made.
    """

    def body(*refs: Any) -> None:
        program({name: lax.axis_index(name) for name in grid}, *refs)

    return mosaic_gpu().kernel(
        body,
        out_type=list(out_type),
        scratch_types=list(scratch),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=own_fields(params),
        interpret=interpret or None,
        **threads,
    )(*operands)


def parted(
    sizes: Mapping[str, int], axes: Axes, config: KernelConfig
) -> tuple[dict[str, int], dict[str, int]]:
    """Split the axes into those of the grid, and those that each program loops over in order."""
    words = dict(zip(axes, semantics_in_force("gpu", config, axes), strict=True))
    grid = {name: size for name, size in sizes.items() if words[name] == "parallel"}
    return grid, {name: size for name, size in sizes.items() if name not in grid}


def for_each(loop: Mapping[str, int], body: Callable[[dict[str, Any]], None]) -> None:
    """Call ``body`` with every place on the axes of a loop, in order."""
    if not loop:
        return body({})

    def run(index: Any, _: None) -> None:
        place: dict[str, Any] = {}
        for name, size in reversed(list(loop.items())):
            place[name], index = lax.rem(index, size), lax.div(index, size)
        body(place)

    return lax.fori_loop(0, int(np.prod(list(loop.values()))), run, None)


def own_fields(params: Any) -> Any:
    """Return the fields that ``plgpu.kernel`` reads itself; grid and pipeline are made here."""
    if params.profile_space and jax_compat.cuda_capability() is None:
        raise KernelError(
            f"profile_dir={params.profile_dir!r}: a profile is written by the process that runs "
            "the kernel; it can be asked for only where there is a GPU."
        )
    return dataclasses.replace(params, dimension_semantics=None, max_concurrent_steps=1)


def default_stream_params() -> Any:
    """Return parameters for kernels that read memory once."""
    return gpu_params(max_concurrent_steps=2, lowering_semantics="lane")
