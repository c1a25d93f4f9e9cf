"""``block_scaled_matmul`` in Mosaic GPU: FP8 tensor cores, and a sum in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxamp.kernels.config import KernelConfig
from jaxamp.kernels.params import gpu_params, mosaic_gpu
from jaxamp.quantized.kernels.gpu.launch import for_each, on_grid, parted
from jaxamp.quantized.kernels.gpu.tiles import F32, ROWS, load, over_columns, over_rows, swizzled
from jaxamp.quantized.kernels.tile_checks import Axes

# For the warpgroup that only copies: as in JAX's own hopper_matmul_mgpu.py (0.10.2).
_MEMORY_REGISTERS = 40


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

    Two warpgroups compute and one copies. Each block of the contraction goes through the tensor
    core into a fresh accumulator and is added to the sum in float32, with its factors: the tensor
    core's own accumulator keeps fewer bits.
    """
    (batch, m, k), n = a.shape, b.shape[1]
    tm, tn, tk = tile
    params = config.gpu or default_matmul_params()
    sizes = {"batch": batch, "rows": m // tm, "columns": n // tn}
    grid, loop = parted(sizes, axes, config)
    warpgroups = 2 if tm % (2 * ROWS) == 0 else 1

    def body(fixed: Mapping[str, Any], *refs: Any) -> None:
        *ins, out_ref, out_s = refs

        def step(at: Mapping[str, Any]) -> None:
            at, part = {**fixed, **at}, _Part.of_this_warpgroup(warpgroups, tile)
            pipeline = _pipeline(part, at, k // tk, ins, params, config.delay_release)
            pipeline(lambda run: part.store(run(part.zero()), at, out_ref, out_s))

        for_each(loop, step)

    out_type = jax.ShapeDtypeStruct((batch, m, n), out_dtype)
    (out,) = on_grid(
        body,
        (a, a_scale.mT, b, b_scale.mT),
        [out_type],
        [mosaic_gpu().SMEM((tm, tn), out_dtype, transforms=swizzled(tn, out_dtype))],
        grid=grid,
        params=params,
        interpret=interpret,
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
    )
    return [out]


@dataclasses.dataclass(frozen=True)
class _Part:
    """The rows of a tile that one of its warpgroups computes."""

    warpgroups: int
    tile: tuple[int, int, int]
    start: Any

    @classmethod
    def of_this_warpgroup(cls, warpgroups: int, tile: tuple[int, int, int]) -> _Part:
        """Return the part of the warpgroup that runs."""
        return cls(warpgroups, tile, lax.axis_index("warpgroup") * (tile[0] // warpgroups))

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.tile[0] // self.warpgroups

    @property
    def own(self) -> Any:
        """Slice of the tile's rows."""
        return pl.ds(self.start, self.rows)

    def zero(self) -> Any:
        """Return a sum of nothing."""
        plgpu = mosaic_gpu()
        return plgpu.layout_cast(jnp.zeros((self.rows, self.tile[1]), F32), plgpu.Layout.WGMMA)

    def add(self, _: Any, a_s: Any, sa_s: Any, b_s: Any, sb_s: Any, total: Any) -> Any:
        """Add the product of one block of the contraction, with its factors."""
        plgpu, cols = mosaic_gpu(), self.tile[1]

        def product(acc: Any) -> Any:
            plgpu.wgmma(acc, a_s.at[self.own], b_s.transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return acc[...]

        block = pl.run_scoped(product, plgpu.ACC((self.rows, cols), F32))
        by_row = load(sa_s, (0, self.own), plgpu.Layout.WGMMA.reduce(1))
        by_col = load(sb_s, (0,), plgpu.Layout.WGMMA.reduce(0))
        return total + block * over_rows(by_row, cols) * over_columns(by_col, self.rows)

    def store(self, total: Any, at: Mapping[str, Any], out_ref: Any, out_s: Any) -> None:
        """Round the sum, and copy it to its place by way of shared memory."""
        plgpu, (tm, tn, _) = mosaic_gpu(), self.tile
        out_s[self.own] = total.astype(out_s.dtype)
        plgpu.commit_smem()
        rows, cols = pl.ds(at["rows"] * tm + self.start, self.rows), pl.ds(at["columns"] * tn, tn)
        plgpu.copy_smem_to_gmem(out_s.at[self.own], out_ref.at[at["batch"]].at[rows, cols])
        plgpu.wait_smem_to_gmem(0)


def _pipeline(
    part: _Part,
    at: Mapping[str, Any],
    blocks: int,
    refs: Sequence[Any],
    params: Any,
    delay_release: int,
) -> Callable[[Any], None]:
    """Go over the blocks of the contraction, in a context that says where the sum goes."""

    def run(context: Any) -> None:
        mosaic_gpu().emit_pipeline_warp_specialized(
            part.add,
            grid=(blocks,),
            in_specs=_operand_specs(part.tile, at, refs[0].dtype, delay_release),
            max_concurrent_steps=params.max_concurrent_steps,
            memory_registers=_MEMORY_REGISTERS,
            wg_axis="warpgroup",
            num_compute_wgs=part.warpgroups,
            compute_context=context,
        )(*(ref.at[at["batch"]] for ref in refs))

    return run


def _operand_specs(
    tile: tuple[int, int, int], at: Mapping[str, Any], dtype: Any, delay_release: int
) -> list[Any]:
    """Return the block specs of each operand and its factors for one step of the contraction."""
    (tm, tn, tk), i, j = tile, at["rows"], at["columns"]
    pieces = swizzled(tk, dtype)

    def spec(shape: tuple[int, int], place: Any, transforms: tuple[Any, ...] = ()) -> Any:
        return mosaic_gpu().BlockSpec(
            shape, place, transforms=transforms, delay_release=delay_release
        )

    return [
        spec((tm, tk), lambda s: (i, s), pieces),
        spec((1, tm), lambda s: (s, i)),
        spec((tn, tk), lambda s: (j, s), pieces),
        spec((1, tn), lambda s: (s, j)),
    ]


def default_matmul_params() -> Any:
    """Return parameters with four steps in flight that both JAX versions compile alike."""
    return gpu_params(max_concurrent_steps=4, lowering_semantics="lane")
