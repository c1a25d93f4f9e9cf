"""Quantizing in one pass over memory: values, scale factors, and the same of the transpose.

The kernel is a JAX primitive: one equation in the program, with a lowering for each platform.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jaxamp.core import jax_compat
from jaxamp.core.define import compiled, define, typed_as
from jaxamp.core.formats import CastConfig, Precision
from jaxamp.errors import KernelError, shown
from jaxamp.kernels.config import KernelConfig, resolve
from jaxamp.kernels.target_gpu import target_gpu
from jaxamp.quantized.kernels.fit import NAME, block_of, misfit, obstacle, tile_of
from jaxamp.quantized.lowp import Blocks, ScaledArray, quantize
from jaxamp.quantized.lowp.scaled_array import factors, stored_scale

_PLATFORMS = {"tpu": "tpu", "cuda": "gpu"}  # JAX's word for a platform and ours
block_quantize_p = Primitive(f"jaxamp_{NAME}")
block_quantize_p.multiple_results = True


class KernelFallbackWarning(UserWarning):
    """A kernel runs as XLA's reference on a platform for which there is a Pallas kernel."""


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
    # All rows are of one matrix where no block spans two.
    lead = (1, -1) if block_of(cast)[0] == 1 and not transposed else (-1, x.shape[-2])
    matrices = x.reshape(*lead, x.shape[-1])
    outs = _run(matrices, resolve(config), cast=cast, transposed=transposed)
    straight = _restored(outs[:2], x.shape, x.dtype, cast)
    if not transposed:
        return straight
    turned = (*x.shape[:-2], x.shape[-1], x.shape[-2])
    return straight, _restored(outs[2:], turned, x.dtype, cast)


def _check_input(x: jax.Array, cast: CastConfig) -> None:
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, np.floating):
        raise KernelError(f"{NAME} takes floats of two or more axes, not {x.dtype}{x.shape}.")
    if not isinstance(cast, CastConfig):
        raise KernelError(
            f"{NAME} takes a cast with a block, CastConfig('f8_e4m3', (1, 128)), not {shown(cast)}."
        )
    if cast.sf_block is None or cast.out_dtype not in (Precision.F8_E4M3, Precision.F8_E5M2):
        raise KernelError(
            f"{NAME} scales blocks to e4m3 or e5m2, and the cast is {cast}. "
            "jaxamp.quantized.lowp.scaled_array scales whole tensors and makes 4-bit values."
        )


def _restored(outs: Any, shape: tuple[int, ...], dtype: Any, cast: CastConfig) -> ScaledArray:
    values, scale = outs
    scale = stored_scale(scale.reshape(Blocks(*block_of(cast)).factors(shape)), cast)
    return ScaledArray(values.reshape(shape), scale, cast, np.dtype(dtype))


def _run(x: Any, config: KernelConfig, **how: Any) -> Sequence[Any]:
    """Check the configuration, and record the kernel or interpret it."""
    simulated = "gpu" if jax_compat.is_gpu_interpreter(config.interpret) else "tpu"
    is_interpreted = config.backend == "interpret"
    if is_interpreted and (reason := obstacle(simulated, x, **how)):
        raise _refusal(reason, "interpret")
    given = {platform for platform in ("tpu", "gpu") if getattr(config, platform) is not None}
    for platform in sorted(given | {simulated} if is_interpreted else given):
        if reason := misfit(platform, config, x, **how):
            raise KernelError(f"{NAME}: {reason}.")
    if not is_interpreted:
        return block_quantize_p.bind(x, config=config, **how)
    mode = True if config.interpret is None else config.interpret
    return _kernel(simulated, x, config=config, interpret=mode, **how)


def _refusal(reason: str, backend: str) -> KernelError:
    return KernelError(
        f"{NAME} with backend={backend!r}: {reason}. backend='auto' takes XLA's reference here."
    )


def _lowered(platform: str, x: Any, *, config: KernelConfig, **how: Any) -> Sequence[Any]:
    """Compute by what a platform has: the Pallas kernel, or XLA's reference."""
    if config.backend == "reference":
        return _reference(x, **how)
    reason = _reason(platform, config, x, **how)
    if reason is None:
        return _kernel(_PLATFORMS[platform], x, config=config, interpret=False, **how)
    if config.backend == "pallas":
        raise _refusal(reason, "pallas")
    if platform:
        text = f"{NAME} runs as XLA's reference: {reason}."
        warnings.warn(text, KernelFallbackWarning, stacklevel=2)
    return _reference(x, **how)


def _reason(platform: str, config: KernelConfig, x: Any, **how: Any) -> str | None:
    """Return why a platform's kernel cannot run; raise if the configuration is to blame."""
    if not platform:
        return "there are Pallas kernels for TPU and CUDA only"
    if platform == "cuda" and (missing := _missing_on_cuda()):
        return missing
    ours = _PLATFORMS[platform]
    if (found := obstacle(ours, x, **how)) is not None:
        return found
    reason = misfit(ours, config, x, **how)
    if reason and (config.tile is not None or getattr(config, ours) is not None):
        raise KernelError(f"{NAME}: {reason}.")
    return reason


def _missing_on_cuda() -> str | None:
    """Return why no Mosaic GPU kernel runs on the GPU at hand; an absent GPU counts as Hopper."""
    gpu = target_gpu()
    if gpu is not None and gpu.capability != (9, 0):
        major, minor = gpu.capability
        return (
            "the kernel is written for Hopper, compute capability 9.0; "
            f"this GPU has {major}.{minor}"
        )
    if not jax_compat.has_module("absl"):
        return "Mosaic GPU needs absl-py, `pip install absl-py`"
    return None


def _reference(x: Any, *, cast: CastConfig, transposed: bool, **_: Any) -> list[Any]:
    outs: list[Any] = []
    for matrix in (x, x.mT) if transposed else (x,):
        scaled = quantize(matrix, cast)
        outs += [scaled.values, factors(scaled)]
    return outs


def _kernel(platform: str, x: Any, *, cast: CastConfig, config: KernelConfig, **how: Any) -> Any:
    """Run the Pallas kernel of a platform, on an array filled up to whole tiles."""
    if platform == "gpu":
        from jaxamp.quantized.kernels import hopper as module  # imported when first needed
    else:
        from jaxamp.quantized.kernels import tpu as module
    rows, cols = x.shape[1:]
    tile = tile_of(platform, config, rows, cols)
    margins = -rows % tile[0], -cols % tile[1]
    filled = jnp.pad(x, [(0, 0), *((0, margin) for margin in margins)]) if any(margins) else x
    outs = module.block_quantize(filled, cast=cast, tile=tile, config=config, **how)
    return _cut(outs, rows, cols, cast) if any(margins) else list(outs)


def _cut(outs: Sequence[Any], rows: int, cols: int, cast: CastConfig) -> list[Any]:
    """Return values and factors without their padding; those of the transpose come after."""
    kept: list[Any] = []
    for values, scales in zip(outs[::2], outs[1::2], strict=True):
        m, n = Blocks(*block_of(cast)).factors((rows, cols))
        kept += [values[..., :rows, :cols], scales[..., :m, :n]]
        rows, cols = cols, rows
    return kept


def _batch(operands: Any, axes: Any, **params: Any) -> Any:
    (x,), (axis,) = operands, axes
    x = jnp.moveaxis(x, axis, 0)
    outs = block_quantize_p.bind(x.reshape(-1, *x.shape[2:]), **params)
    return [out.reshape(*x.shape[:2], *out.shape[1:]) for out in outs], [0] * len(outs)


def _refuse_derivative(*_: Any, **__: Any) -> Any:
    raise KernelError(
        f"{NAME} has no derivative: rounding is flat almost everywhere. Use it "
        "inside a jax.custom_vjp that says what the gradient shall be, or let amp quantize: "
        "its recipes treat rounding as the identity."
    )


define(
    block_quantize_p,
    compiled(block_quantize_p),
    typed_as(_reference),
    _batch,
    _refuse_derivative,
    {platform or None: partial(_lowered, platform) for platform in ("", *_PLATFORMS)},
)
