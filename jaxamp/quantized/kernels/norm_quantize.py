"""RMSNorm and LayerNorm whose results are quantized before they reach memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import batching

from jaxamp.core.formats import CastConfig
from jaxamp.errors import KernelError
from jaxamp.kernels.config import KernelConfig
from jaxamp.quantized.kernels.block_quantize import check_cast, fill, module_of
from jaxamp.quantized.kernels.primitive import KernelPrimitive
from jaxamp.quantized.kernels.tile_checks import Axes, block_of, check_grid, check_tile
from jaxamp.quantized.lowp import ScaledArray, quantize
from jaxamp.quantized.lowp.quantize import stored_scale
from jaxamp.quantized.lowp.scaled_array import factors

NAME = "norm_quantize"
GPU_AXES: Axes = {"rows": True, "columns": False}  # sums run along the columns
TPU_AXES: Axes = {"rows": True}  # a tile holds whole rows
_ROWS = 64  # of a tile on a GPU
_COLUMNS = 128


def norm_quantize(
    x: Any,
    cast: CastConfig,
    weight: Any = None,
    bias: Any = None,
    *,
    center: bool = False,
    eps: float = 1e-6,
    config: KernelConfig | None = None,
) -> ScaledArray:
    """Normalize along the last axis and quantize, so that the wide result is never stored.

    With ``y = x - mean(x)`` if ``center`` (LayerNorm, arXiv:1607.06450), else ``y = x`` (RMSNorm,
    arXiv:1910.07467), it is ``quantize(y / sqrt(mean(y**2) + eps) * weight + bias)``, all in
    float32.

    Args:
      x: floats of shape (..., columns).
      cast: e4m3 or e5m2 with blocks of one row.
      weight: shape (columns,); left out, ones.
      bias: shape (columns,); left out, zeros.
      center: whether the mean is subtracted.
      eps: added to the mean square.
      config: how to compile; ``tile`` is (rows,), a multiple of 32 on a TPU and 64 on a GPU.

    Returns:
      A ``ScaledArray`` of the shape of ``x``. The platforms add up in different orders, so that a
      value may fall on the other side of a rounding.

    Raises:
      KernelError: the cast is not a block scaling of rows, shapes do not fit, or the configuration
        cannot work.

    >>> q = norm_quantize(jnp.ones((2, 128)), CastConfig("f8_e4m3", sf_block=(1, 128)))
    >>> q.values[0, 0], q.scale.shape
    (Array(448, dtype=float8_e4m3fn), (2, 1))
    """
    x = jnp.asarray(x)
    _check_operands(x, cast, weight, bias)
    cols = x.shape[-1]
    weight = jnp.ones(cols, np.float32) if weight is None else jnp.asarray(weight)
    bias = jnp.zeros(cols, np.float32) if bias is None else jnp.asarray(bias)
    values, scale = _primitive(
        x.reshape(-1, cols), weight, bias, cast=cast, center=center, eps=float(eps), config=config
    )
    stored = stored_scale(scale.reshape(*x.shape[:-1], scale.shape[-1]), cast)
    return ScaledArray(values.reshape(x.shape), stored, cast, np.dtype(x.dtype))


def _check_operands(x: jax.Array, cast: CastConfig, *vectors: Any) -> None:
    check_cast(NAME, cast)
    if block_of(cast)[0] != 1:
        raise KernelError(f"{NAME} quantizes rows; blocks of {cast} span several.")
    if x.ndim < 1 or not jnp.issubdtype(x.dtype, np.floating):
        raise KernelError(f"{NAME} takes floats, not {x.dtype}{x.shape}.")
    for vector in vectors:
        if vector is not None and jnp.shape(vector) != x.shape[-1:]:
            raise KernelError(
                f"{NAME}: weight and bias have shape {x.shape[-1:]}, not {jnp.shape(vector)}."
            )


def _reference(
    x: Any, weight: Any, bias: Any, *, cast: CastConfig, center: bool, eps: float
) -> list[Any]:
    wide = x.astype(np.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True) if center else wide
    power = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normal = wide * lax.rsqrt(power + np.float32(eps))
    scaled = quantize(normal * weight.astype(np.float32) + bias.astype(np.float32), cast)
    return [scaled.values, factors(scaled)]


def _rows(platform: str, config: KernelConfig, x: Any) -> int:
    """Return the rows of a tile; on a TPU as many as keep it at a megabyte."""
    if platform == "gpu":
        return _ROWS
    if config.tile:
        return config.tile[0]
    fitting = 2**20 // (4 * x.shape[1]) // 32 * 32
    return min(max(fitting, 32), -(-x.shape[0] // 32) * 32)


def _on(
    platform: str, x: Any, weight: Any, bias: Any, *, cast: CastConfig, **how: Any
) -> list[Any]:
    """Return the Pallas kernel of a platform, on rows filled up to whole tiles."""
    rows = _rows(platform, how["config"], x)
    tile, axes = ((rows, _COLUMNS), GPU_AXES) if platform == "gpu" else ((rows,), TPU_AXES)
    outs = module_of(platform).norm_quantize(
        fill(x, (rows, 1)), weight, bias, cast=cast, tile=tile, axes=axes, **how
    )
    return [out[: x.shape[0]] for out in outs]


def _check(platform: str, config: KernelConfig, **_: Any) -> None:
    axes = GPU_AXES if platform == "gpu" else TPU_AXES
    check_grid(NAME, platform, config, axes, inputs=3)
    limits = (_ROWS, _ROWS) if platform == "gpu" else (32, None)
    check_tile(NAME, platform, config, rows=limits)


def _memory(platform: str, config: KernelConfig, x: Any, weight: Any, bias: Any, **_: Any) -> int:
    rows = _rows(platform, config, x)
    if platform == "gpu":
        steps = 1 if config.gpu is None else config.gpu.max_concurrent_steps
        read = rows * _COLUMNS * x.dtype.itemsize
        # The second pass needs more than the first: weight and bias, values and factors too.
        return steps * (read + 8 * _COLUMNS) + rows * (_COLUMNS + 16)
    # Input and output twice, for the copy under way, and three float32 values within.
    return rows * x.shape[1] * (2 * x.dtype.itemsize + 2 + 12)


def _obstacle(
    platform: str, x: Any, weight: Any, bias: Any, *, cast: CastConfig, **_: Any
) -> str | None:
    width = block_of(cast)[1]
    if x.dtype == np.float64 or (platform == "tpu" and np.float16 in (x.dtype, weight.dtype)):
        return f"Mosaic {platform.upper()} takes no {x.dtype}"
    if width not in (32, 64, 128) or x.shape[1] % _COLUMNS:
        return (
            f"rows of {x.shape[1]} in blocks of {width} are not whole tiles of {_COLUMNS} columns"
        )
    return None


def _batch(call: KernelPrimitive, operands: Any, axes: Any, **params: Any) -> Any:
    """Batch as more rows; weights of their own for each batch make a loop."""
    x, weight, bias = operands
    if axes[1] is None and axes[2] is None:
        x = jnp.moveaxis(x, axes[0], 0)
        outs = call.primitive.bind(x.reshape(-1, x.shape[-1]), weight, bias, **params)
        return [out.reshape(*x.shape[:2], -1) for out in outs], [0, 0]
    size = next(v.shape[axis] for v, axis in zip(operands, axes, strict=True) if axis is not None)
    fronted = [batching.bdim_at_front(v, a, size) for v, a in zip(operands, axes, strict=True)]
    return lax.map(lambda one: call.primitive.bind(*one, **params), tuple(fronted)), [0, 0]


_primitive = KernelPrimitive(NAME, _reference, _on, _check, _memory, _obstacle, _batch)
