"""Products of block-scaled FP8 matrices, added up in float32 block by block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import batching
from jax.typing import DTypeLike

from jaxamp.core import jax_compat
from jaxamp.errors import KernelError
from jaxamp.kernels.config import KernelConfig
from jaxamp.quantized.kernels.block_quantize import check_cast, fill, module_of
from jaxamp.quantized.kernels.primitive import KernelPrimitive
from jaxamp.quantized.kernels.tile_checks import Axes, block_of, check_grid, check_tile
from jaxamp.quantized.lowp import ScaledArray
from jaxamp.quantized.lowp.scaled_array import factors

NAME = "block_scaled_matmul"
AXES: Axes = {"batch": True, "rows": True, "columns": True, "contraction": False}
# On a GPU the largest of _SIZES. On a TPU a choice of 1.3 of 16 MiB of VMEM, with a float32 result,
# and timed on none.
_TILES = {"gpu": (128, 128, 128), "tpu": (256, 256, 512)}
_UNIT = 128
# Of a tile: multiples and limits. On a GPU two warpgroups hold it in registers, twice.
_SIZES = {
    "gpu": {"rows": (64, 128), "columns": (64, 128), "contraction": (128, 128)},
    "tpu": {"rows": (128, None), "columns": (128, None), "contraction": (128, None)},
}
_GPU_STEPS = 4  # as many tiles of both operands fit SHARED_MEMORY beside a float32 tile
_OUT = tuple(map(np.dtype, ("float32", "bfloat16", "float16")))


def block_scaled_matmul(
    a: ScaledArray,
    b: ScaledArray,
    *,
    out_dtype: DTypeLike = np.float32,
    config: KernelConfig | None = None,
) -> jax.Array:
    """Compute ``dequantize(a) @ dequantize(b).T`` from the FP8 values themselves.

    Both operands are contracted over their last axis, along which tensor cores read them: weights
    of shape (in, out) go in transposed, as ``block_quantize(w, transposed=True)`` makes them.
    Every block of the contraction is multiplied in FP8, and the products of blocks are scaled and
    added up in float32 (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).

    Args:
      a: shape (..., M, K) in e4m3 or e5m2, with blocks as long along K as those of ``b``.
      b: shape (..., N, K), with the same leading axes or none.
      out_dtype: float32, bfloat16 or float16; the float32 sum is rounded to it once.
      config: how to compile; ``tile`` is (rows, columns, contraction): multiples of 128 on a TPU,
        on a GPU 64 or 128 rows and columns, and 128.

    Returns:
      Shape (..., M, N).

    Raises:
      KernelError: shapes or blocks do not fit each other, or the configuration cannot work.

    >>> from jaxamp.core.formats import CastConfig
    >>> from jaxamp.quantized.kernels import block_quantize
    >>> a = block_quantize(jnp.ones((2, 256)), CastConfig("f8_e4m3", sf_block=(1, 128)))
    >>> b = block_quantize(jnp.ones((3, 256)), CastConfig("f8_e4m3", sf_block=(128, 128)))
    >>> block_scaled_matmul(a, b)[0]
    Array([256., 256., 256.], dtype=float32)
    """
    _check_operands(a, b, out_dtype)
    shape = (*a.shape[:-1], b.shape[-2])
    # One b for all: the rows of all matrices of a are rows of one.
    lead = (1, -1) if b.ndim == 2 else (-1, a.shape[-2])
    a_scale, b_scale = _row_factors(a), _row_factors(b)
    (out,) = _primitive(
        a.values.reshape(*lead, a.shape[-1]),
        a_scale.reshape(*lead, a_scale.shape[-1]),
        b.values.reshape(-1, *b.shape[-2:]),
        b_scale.reshape(-1, *b_scale.shape[-2:]),
        width=block_of(a.cast)[1],
        out_dtype=np.dtype(out_dtype),
        config=config,
    )
    return out.reshape(shape)


def _check_operands(a: ScaledArray, b: ScaledArray, out_dtype: Any) -> None:
    for x in (a, b):
        if not isinstance(x, ScaledArray):
            raise KernelError(f"{NAME} takes two ScaledArrays, not {type(x).__name__}.")
        check_cast(NAME, x.cast)
    (_, ka), (_, kb) = block_of(a.cast), block_of(b.cast)
    if a.ndim < 2 or a.shape[-1] != b.shape[-1] or ka != kb:
        raise KernelError(
            f"{NAME} contracts the last axes, which must be of one size and have blocks of one "
            f"length: got {a.shape} in {a.cast} and {b.shape} in {b.cast}."
        )
    if b.ndim != 2 and a.shape[:-2] != b.shape[:-2]:
        raise KernelError(f"{NAME}: leading axes differ: {a.shape} and {b.shape}.")
    if np.dtype(out_dtype) not in _OUT:
        raise KernelError(f"{NAME}: out_dtype is one of {', '.join(map(str, _OUT))}.")


def _row_factors(x: ScaledArray) -> jax.Array:
    """Return a factor for each row and each block of the contraction, float32."""
    rows = block_of(x.cast)[0]
    scale = factors(x)
    return scale if rows == 1 else jnp.repeat(scale, rows, axis=-2)[..., : x.shape[-2], :]


def _reference(
    a: Any, a_scale: Any, b: Any, b_scale: Any, *, width: int, out_dtype: Any
) -> list[Any]:
    left, right = _dequantized(a, a_scale, width), _dequantized(b, b_scale, width)
    contract = (((2,), (2,)), ((0,), (0,)))
    out = lax.dot_general(left, right, contract, precision=lax.Precision.HIGHEST)
    return [out.astype(out_dtype)]


def _dequantized(values: Any, scale: Any, width: int) -> jax.Array:
    return values.astype(np.float32) * jnp.repeat(scale, width, axis=2)[..., : values.shape[2]]


def _tile(platform: str, config: KernelConfig, m: int, n: int, k: int) -> tuple[int, int, int]:
    tm, tn, tk = config.tile or _TILES[platform]
    up = [-(-size // _UNIT) * _UNIT for size in (m, n, k)]
    # The padded K must be whole steps; a step that does not divide it is cut to one block.
    return min(tm, up[0]), min(tn, up[1]), tk if up[2] % tk == 0 else _UNIT


def _on(
    platform: str, a: Any, a_scale: Any, b: Any, b_scale: Any, *, width: int, **how: Any
) -> list[Any]:
    """Return the Pallas kernel of a platform, on operands filled up to whole tiles."""
    (m, k), n = a.shape[1:], b.shape[1]
    tile = _tile(platform, how["config"], m, n, k)
    tm, tn = tile[:2]
    filled = (
        fill(a, (tm, _UNIT)),
        fill(a_scale, (tm, 1)),
        fill(b, (tn, _UNIT)),
        fill(b_scale, (tn, 1)),
    )
    (out,) = module_of(platform).block_scaled_matmul(*filled, tile=tile, axes=AXES, **how)
    return [out[:, :m, :n]]


def _check(platform: str, config: KernelConfig, **_: Any) -> None:
    check_grid(NAME, platform, config, AXES, inputs=4)
    check_tile(NAME, platform, config, **_SIZES[platform])


def _memory(
    platform: str,
    config: KernelConfig,
    a: Any,
    a_scale: Any,
    b: Any,
    b_scale: Any,
    *,
    out_dtype: Any,
    **_: Any,
) -> int:
    tm, tn, tk = _tile(platform, config, a.shape[1], b.shape[1], a.shape[2])
    read = (tm + tn) * (tk + 4 * tk // _UNIT)
    size = np.dtype(out_dtype).itemsize
    if platform == "gpu":
        steps = _GPU_STEPS if config.gpu is None else config.gpu.max_concurrent_steps
        return min(steps, -(-a.shape[2] // tk)) * read + tm * tn * size
    return 2 * read + tm * tn * (2 * size + 4)


def _obstacle(
    platform: str, a: Any, a_scale: Any, b: Any, b_scale: Any, *, width: int, out_dtype: Any
) -> str | None:
    if width != _UNIT:
        return f"the kernels contract over blocks of {_UNIT}, not {width}"
    if platform == "tpu" and out_dtype == np.float16:
        return "Mosaic TPU takes no float16"
    if platform == "gpu" and a.dtype != b.dtype and not jax_compat.WGMMA_MIXES_FP8:
        return f"wgmma takes one format before JAX 0.11, not {a.dtype} and {b.dtype}"
    return None


def _batch(call: KernelPrimitive, operands: Any, axes: Any, **params: Any) -> Any:
    """Batch the product; where only ``a`` has the axis, stack its rows in one matrix."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    only_a = axes[2] is None and axes[3] is None and operands[2].shape[0] == 1
    moved = [*zip(operands, axes, strict=True)][: 2 if only_a else 4]
    fronted = [batching.bdim_at_front(x, axis, size) for x, axis in moved]
    inner, rows = fronted[0].shape[1:3]
    lead = (1, -1) if only_a else (-1,)
    flat = [x.reshape(*lead, *x.shape[1 + len(lead) :]) for x in fronted]
    flat += operands[len(flat) :]
    (out,) = call.primitive.bind(*flat, **params)
    return [out.reshape(size, inner, rows, out.shape[-1])], [0]


_primitive = KernelPrimitive(NAME, _reference, _on, _check, _memory, _obstacle, _batch)
