"""Choice of a platform's attention kernel and its way with a mask, or why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxamp.core import jax_compat
from jaxamp.found.attention.kernels import cudnn
from jaxamp.found.attention.kernels.fused import Fused, by_heads, flattened
from jaxamp.found.attention.kernels.known_masks import Intervals, KnownMask
from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands
from jaxamp.found.attention.kernels.splash import EXPORTED_SPLASH, SPLASH
from jaxamp.kernels.jax_compat.kernel_lowering import divides_by_rule, is_exported
from jaxamp.kernels.target_gpu import (
    TargetGpu,
    described_platform,
    gpu_of,
    target_gpu,
    target_platform,
)


def ways(kernel: Fused, spec: AttentionSpec) -> Iterator[Fused]:
    """Yield a kernel as it takes a specification: in ways that cost more and more.

    Segments of one size are examples of a shorter attention; a bias is read for each score.
    """
    yield kernel
    if (mask := spec.mask) is None:
        return
    if isinstance(mask, Intervals) and mask.segments is not None:
        yield _on_segments(kernel, *mask.segments)
    yield _with_bias_of(kernel, mask)


def _with_bias_of(kernel: Fused, mask: KnownMask) -> Fused:
    """Return a kernel that reads a known mask as a bias."""

    def biased(operands: Operands) -> Operands:
        bias = 0.0 if operands.bias is None else operands.bias
        return operands._replace(bias=jnp.where(mask.seen()[None, None], bias, -jnp.inf))

    def obstacle(operands: Operands, spec: AttentionSpec, backward: bool) -> str | None:
        types = jax.eval_shape(biased, operands)
        return kernel.obstacle(types, replace(spec, mask=None), backward)

    def run(operands: Operands, spec: AttentionSpec, bias_grad: bool) -> tuple[Any, ...]:
        return kernel.run(biased(operands), replace(spec, mask=None), bias_grad)

    return replace(kernel, obstacle=obstacle, run=run)


def _on_segments(kernel: Fused, queries: int, keys: int) -> Fused:
    """Return a kernel that takes segments of so many queries and keys for examples."""

    def own(spec: AttentionSpec) -> AttentionSpec:
        has_window = spec.window is not None and spec.window < keys
        return replace(spec, mask=None, window=spec.window if has_window else None)

    def cut(operands: Operands) -> Operands:
        q, k, v, _, out, lse, dout = operands
        q, out, dout = (x if x is None else _cut(x, queries) for x in (q, out, dout))
        lse = lse if lse is None else by_heads(_cut(by_heads(lse), queries))
        return Operands(q, _cut(k, keys), _cut(v, keys), None, out, lse, dout)

    def obstacle(operands: Operands, spec: AttentionSpec, backward: bool) -> str | None:
        if operands.bias is not None:
            return "a bias is for words of several segments"
        return kernel.obstacle(jax.eval_shape(cut, operands), own(spec), backward)

    def run(operands: Operands, spec: AttentionSpec, bias_grad: bool) -> tuple[Any, ...]:
        first, *rest, last = kernel.run(cut(operands), own(spec), False)
        first = _cut(first, length := operands.q.shape[1])
        if operands.dout is None:
            return first, by_heads(_cut(by_heads(last), length))
        return (first, *(_cut(x, operands.k.shape[1]) for x in rest), None)

    return replace(kernel, obstacle=obstacle, run=run)


def _cut(x: Any, size: int) -> Any:
    """Return an array [B, words, ...] as examples of so many words."""
    return x.reshape(-1, size, *x.shape[2:])


PLATFORMS = ("cuda", "tpu")
"""Those that have kernels, in JAX's words."""


def chosen(platform: str, context: Any, operands: Operands, spec: AttentionSpec) -> Fused | None:
    """Return the kernel that a platform runs; ``None`` where the composed form is lowered."""
    if jax_compat.is_partitioned(context) and not (platform == "cuda" and divides_by_rule(context)):
        return None
    flat, backward = flattened(operands), operands.dout is not None
    splash = EXPORTED_SPLASH if is_exported(context) else SPLASH
    for kernel in _of_gpu(gpu_of(context)) if platform == "cuda" else [splash]:
        for way in ways(kernel, spec):
            if way.obstacle(flat, spec, backward) is None:
                return way
    return None


def everywhere() -> list[Fused]:
    """Return the kernels of all platforms, on devices that take the most."""
    return [*_of_gpu(cudnn.NEWEST), SPLASH]


def at_hand() -> list[Fused]:
    """Return the kernels of the devices at hand, or of the one that is described.

    Where there are several TPUs, XLA may partition a program over them, and kernels are none of it.
    It cannot be told how to: "Custom emitter for CustomSPMDPartitioning not found", libtpu of JAX
    0.10.2.
    """
    platform = target_platform()
    if platform == "tpu":
        return [SPLASH] if described_platform() or jax.device_count() == 1 else []
    return _of_gpu(target_gpu()) if platform == "cuda" else []


def _of_gpu(gpu: TargetGpu | None) -> list[Fused]:
    return [] if gpu is None else [cudnn.on(gpu)]


def refusal(operands: Operands, spec: AttentionSpec, kernels: Sequence[Fused]) -> str | None:
    """Return in words why no kernel takes operands both ways; ``None`` if one does.

    >>> import jax
    >>> x = jax.ShapeDtypeStruct((1, 64, 4, 300), "bfloat16")
    >>> refusal(Operands(x, x, x), AttentionSpec(scale=1.0), everywhere())
    'cuDNN: The head dim must be <= 256 and a multiple of 8, but got 300.'
    """
    flat = flattened(operands)
    reasons = []
    for kernel in kernels:
        reason: str | None = None
        for way in ways(kernel, spec):
            passes = (way.obstacle(flat, spec, backward) for backward in (False, True))
            reason = next(filter(None, passes), None)
            if reason is None:
                return None
        reasons.append(f"{kernel.name}: {reason}")
    return reasons[0] if reasons else "there is no kernel"
