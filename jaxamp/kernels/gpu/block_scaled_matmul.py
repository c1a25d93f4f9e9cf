"""``block_scaled_matmul`` in Mosaic GPU: FP8 tensor cores, and a sum in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxamp.kernels.checks import Axes
from jaxamp.kernels.config import KernelConfig
from jaxamp.kernels.gpu.launch import for_each, own_fields, parted
from jaxamp.kernels.gpu.tiles import F32, ROWS, load, over_columns, over_rows, swizzled
from jaxamp.kernels.params import gpu_params, mosaic_gpu

_MEMORY_REGISTERS = 40  # for the warpgroup that only copies


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
    sizes = {"batch": batch, "rows": m // tm, "columns": n // tn}
    grid, loop = parted(sizes, axes, config)
    pieces = swizzled(tk, a.dtype)

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
            by_row = load(sa_s, (0, own), plgpu.Layout.WGMMA.reduce(1))
            by_col = load(sb_s, (0,), plgpu.Layout.WGMMA.reduce(0))
            return total + block * over_rows(by_row, tn) * over_columns(by_col, part)

        def spec(shape: tuple[int, int], place: Any, transforms: tuple[Any, ...] = ()) -> Any:
            return plgpu.BlockSpec(
                shape, place, transforms=transforms, delay_release=config.delay_release
            )

        i, j = at["rows"], at["columns"]
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(k // tk,),
            in_specs=[
                spec((tm, tk), lambda s: (i, s), pieces),
                spec((1, tm), lambda s: (s, i)),
                spec((tn, tk), lambda s: (j, s), pieces),
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
        for_each(loop, lambda at: tile_product(fixed | at, ins, out_ref, out_s))

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, m, n), out_dtype),
        scratch_types=[plgpu.SMEM((tm, tn), out_dtype, transforms=swizzled(tn, out_dtype))],
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=own_fields(params),
        interpret=interpret or None,
    )(a, a_scale.mT, b, b_scale.mT)
    return [out]


def default_matmul_params() -> Any:
    """Four steps in flight, and the semantics that both JAX versions compile alike."""
    return gpu_params(max_concurrent_steps=4, lowering_semantics="lane")
