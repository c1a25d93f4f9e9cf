"""Quantizing in one pass over memory: values, scale factors, and the same of the transpose."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp.core.formats import CastConfig, Precision
from jaxamp.errors import KernelError, shown
from jaxamp.kernels.config import KernelConfig
from jaxamp.quantized.kernels.primitive import KernelPrimitive
from jaxamp.quantized.kernels.tile_checks import (
    Axes,
    block_of,
    check_grid,
    check_tile,
    semantics_in_force,
)
from jaxamp.quantized.lowp import ScaledArray, quantize
from jaxamp.quantized.lowp.quantize import stored_scale
from jaxamp.quantized.lowp.scaled_array import factors

NAME = "block_quantize"
AXES: Axes = {"batch": True, "rows": True, "columns": True}
# Blocks for which there are kernels; of others XLA makes what it can.
BLOCKS = ((1, 32), (1, 64), (1, 128), (128, 128))
# On a GPU the smallest that holds whole blocks; on a TPU a choice, timed on none.
_TILES = {"gpu": (128, 128), "tpu": (256, 512)}
_UNIT = 128


def block_quantize(
    x: Any, cast: CastConfig, *, transposed: bool = False, config: KernelConfig | None = None
) -> Any:
    """Quantize as ``lowp.quantize`` does, bit for bit, by a kernel that reads the array once.

    Args:
      x: floats of shape (..., rows, columns).
      cast: e4m3 or e5m2 with a block; there are kernels for blocks of 1 × 32, 1 × 64, 1 × 128 and
        128 × 128.
      transposed: whether ``x`` with its last two axes exchanged is quantized too, with blocks of
        its own: what a backward pass contracts over.
      config: how to compile; ``tile`` is (rows, columns), multiples of 128.

    Returns:
      A ``ScaledArray``, or with ``transposed`` a pair of them. XLA's reference, the Pallas kernels
      and ``lowp.quantize`` give the same bits.

    Raises:
      KernelError: the cast has no block or another format, ``x`` is not a matrix of floats, or the
        configuration cannot work.

    >>> q = block_quantize(jnp.ones((4, 256)), CastConfig("f8_e4m3", sf_block=(1, 128)))
    >>> q.values.dtype, q.scale.shape
    (dtype(float8_e4m3fn), (4, 2))
    """
    x = jnp.asarray(x)
    _check_input(x, cast)
    matrices = _as_matrices(x, cast, transposed)
    outs = _primitive(matrices, cast=cast, transposed=transposed, config=config)
    straight = _restored(outs[:2], x.shape, x.dtype, cast)
    if not transposed:
        return straight
    turned = (*x.shape[:-2], x.shape[-1], x.shape[-2])
    return straight, _restored(outs[2:], turned, x.dtype, cast)


def _check_input(x: jax.Array, cast: CastConfig) -> None:
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, np.floating):
        raise KernelError(f"{NAME} takes floats of two or more axes, not {x.dtype}{x.shape}.")
    check_cast(NAME, cast)


def check_cast(kernel: str, cast: CastConfig) -> None:
    """Refuse a cast that is not a block scaling to 8 bits."""
    if not isinstance(cast, CastConfig):
        raise KernelError(
            f"{kernel} takes a cast with a block, CastConfig('f8_e4m3', (1, 128)), not "
            f"{shown(cast)}."
        )
    if cast.sf_block is None or cast.out_dtype not in (Precision.F8_E4M3, Precision.F8_E5M2):
        raise KernelError(
            f"{kernel} scales blocks to e4m3 or e5m2, and the cast is {cast}. "
            "jaxamp.quantized.lowp.quantize scales whole tensors and makes 4-bit values."
        )


def _as_matrices(x: jax.Array, cast: CastConfig, transposed: bool) -> jax.Array:
    """Reshape to (batch, rows, columns); all rows in one matrix where no block spans two."""
    if block_of(cast)[0] == 1 and not transposed:
        return x.reshape(1, -1, x.shape[-1])
    return x.reshape(-1, *x.shape[-2:])


def _restored(outs: Any, shape: tuple[int, ...], dtype: Any, cast: CastConfig) -> ScaledArray:
    values, scale = outs
    rows = -(-shape[-2] // block_of(cast)[0])
    scale = scale.reshape(*shape[:-2], rows, scale.shape[-1])
    return ScaledArray(values.reshape(shape), stored_scale(scale, cast), cast, np.dtype(dtype))


def _reference(x: Any, *, cast: CastConfig, transposed: bool) -> list[Any]:
    outs: list[Any] = []
    for matrix in (x, x.mT) if transposed else (x,):
        scaled = quantize(matrix, cast)
        outs += [scaled.values, factors(scaled)]
    return outs


def _tile(platform: str, config: KernelConfig, rows: int, cols: int) -> tuple[int, int]:
    tm, tn = config.tile or _TILES[platform]
    return min(tm, -(-rows // _UNIT) * _UNIT), min(tn, -(-cols // _UNIT) * _UNIT)


def _on(platform: str, x: Any, *, cast: CastConfig, transposed: bool, **how: Any) -> list[Any]:
    """Return the Pallas kernel of a platform, on an array filled up to whole tiles."""
    module = module_of(platform)
    rows, cols = x.shape[1:]
    tile = _tile(platform, how["config"], rows, cols)
    filled = fill(x, tile)
    outs = module.block_quantize(
        filled, cast=cast, transposed=transposed, tile=tile, axes=AXES, **how
    )
    return cut(outs, rows, cols, cast) if filled is not x else list(outs)


def cut(outs: Any, rows: int, cols: int, cast: CastConfig) -> list[Any]:
    """Return values and factors without their padding; those of the transpose come after."""
    shapes = [(rows, cols), (cols, rows)][: len(outs) // 2]
    block_rows, block_cols = block_of(cast)
    kept: list[Any] = []
    for (values, scales), (m, n) in zip(
        zip(outs[::2], outs[1::2], strict=True), shapes, strict=True
    ):
        kept += [values[..., :m, :n], scales[..., : -(-m // block_rows), : -(-n // block_cols)]]
    return kept


def fill(x: Any, units: tuple[int, ...]) -> Any:
    """Return an array with zeros behind, so that its last axes are multiples of ``units``."""
    margins = [-size % unit for size, unit in zip(x.shape[-len(units) :], units, strict=True)]
    if not any(margins):
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - len(units)) + [(0, margin) for margin in margins])


def module_of(platform: str) -> Any:
    """Return the module with a platform's kernels, imported when first needed."""
    if platform == "gpu":
        from jaxamp.quantized.kernels import gpu

        return gpu
    from jaxamp.quantized.kernels import tpu

    return tpu


def _check(platform: str, config: KernelConfig, *, transposed: bool, **_: Any) -> None:
    check_grid(NAME, platform, config, AXES, inputs=1)
    check_tile(NAME, platform, config, rows=(_UNIT, None), columns=(_UNIT, None))
    if transposed and platform == "gpu" and config.gpu is not None:
        _check_lane(config.gpu)


def _memory(platform: str, config: KernelConfig, x: Any, *, transposed: bool, **_: Any) -> int:
    tm, tn = _tile(platform, config, *x.shape[1:])
    read = _steps_in_flight(platform, config, x, (tm, tn)) * tm * tn * x.dtype.itemsize
    # Values, and factors of blocks of 32 at most; on a TPU twice, for the copy under way.
    written = tm * tn * 5 // 4 * (2 if transposed else 1) * (1 if platform == "gpu" else 2)
    return read + written


def _steps_in_flight(platform: str, config: KernelConfig, x: Any, tile: tuple[int, int]) -> int:
    """Return how many tiles of the input are held at once."""
    if platform == "tpu":
        return 2
    words = semantics_in_force("gpu", config, AXES)
    sizes = x.shape[0], -(-x.shape[1] // tile[0]), -(-x.shape[2] // tile[1])
    steps = math.prod(n for n, word in zip(sizes, words, strict=True) if word != "parallel")
    return min(steps, 1 if config.gpu is None else config.gpu.max_concurrent_steps)


def _check_lane(params: Any) -> None:
    if params.lowering_semantics.name != "Lane":
        raise KernelError(
            f"{NAME}: the transposed copy takes a register layout that Mosaic GPU infers with "
            "lowering_semantics='lane' only; write gpu_params(lowering_semantics='lane', ...)."
        )


def _obstacle(platform: str, x: Any, *, cast: CastConfig, transposed: bool) -> str | None:
    if cast.sf_block not in BLOCKS:
        words = ", ".join(f"{r} x {c}" for r, c in BLOCKS)
        return f"there are kernels for blocks of {words}, not {cast.sf_block}"
    if x.dtype == np.float64 or (platform == "tpu" and x.dtype == np.float16):
        return f"Mosaic {platform.upper()} takes no {x.dtype}"
    if platform == "gpu" and transposed and cast.sf_block[1] < 64:
        return "the transposed copy needs blocks of at least 64"
    return None


def _batch(call: KernelPrimitive, operands: Any, axes: Any, **params: Any) -> Any:
    (x,), (axis,) = operands, axes
    x = jnp.moveaxis(x, axis, 0)
    outs = call.primitive.bind(x.reshape(-1, *x.shape[2:]), **params)
    return [out.reshape(*x.shape[:2], *out.shape[1:]) for out in outs], [0] * len(outs)


_primitive = KernelPrimitive(NAME, _reference, _on, _check, _memory, _obstacle, _batch)
