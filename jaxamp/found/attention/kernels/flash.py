"""``flash_attention``, JAX's other Pallas kernel for TPU, which adds biases."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxamp.found.attention.kernels.fused import Fused
from jaxamp.found.attention.kernels.known_masks import Segments
from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands, Results, scores_shape
from jaxamp.found.attention.kernels.splash import block, by_heads, tpu_obstacle
from jaxamp.kernels.jax_compat.tpu_attention import flash_backward, flash_forward

_LARGEST = 1e30
"""Of a bias: where a block of keys is all minus infinity, the kernel takes that from itself."""


def obstacle(operands: Operands, spec: AttentionSpec, backward: bool) -> str | None:
    """Return why it does not take these operands."""
    q, k, v, bias = operands
    if spec.window is not None:
        return "flash_attention has no windows"
    if not isinstance(spec.mask, Segments | None):
        return "flash_attention takes causal masks and segments alone"
    if q.shape[2] != k.shape[2]:
        return "flash_attention needs a key head for each query head"
    if q.shape[-1] != v.shape[-1]:
        return "flash_attention needs values of the size of keys"
    if bias is not None and not spec.scale:
        return "flash_attention multiplies the bias too, here by zero"
    if bias is not None and bias.shape != scores_shape(q, k):
        return "flash_attention reads a bias for each score, and this one is smaller"
    return tpu_obstacle(q, k, v)


def forward(operands: Operands, spec: AttentionSpec) -> tuple[Any, Any]:
    """Compute output and lse."""
    out, total, top = flash_forward(
        *_known(operands, spec), spec.causal, spec.scale, _blocks(operands.q, operands.k)
    )
    return by_heads(out), top + jnp.log(total)


def backward(
    operands: Operands, results: Results, spec: AttentionSpec, bias_grad: bool
) -> tuple[Any, ...]:
    """Compute the cotangents."""
    out, lse, dout = results
    known = [*_known(operands, spec), by_heads(out)]
    residuals = (*known, jnp.ones_like(lse), lse)  # exponentials of s - lse sum up to one
    blocks = _blocks(operands.q, operands.k)
    found = flash_backward(residuals, by_heads(dout), spec.causal, spec.scale, blocks)
    dbias = found[3] / spec.scale if bias_grad else None
    return (*map(by_heads, found[:3]), dbias)


def _known(operands: Operands, spec: AttentionSpec) -> tuple[Any, Any, Any, Any, Any]:
    """Return operands and segments as the kernel has them: a bias is multiplied by scale, too."""
    q, k, v = map(by_heads, operands[:3])
    unscaled = segments = None
    if operands.bias is not None:
        most = _LARGEST / max(1.0, abs(spec.scale))
        unscaled = jnp.clip(operands.bias.astype(jnp.float32) / spec.scale, -most, most)
    if isinstance(spec.mask, Segments):
        numbers = spec.mask.queries, spec.mask.keys
        segments = [jnp.broadcast_to(x, (len(q), len(x))) for x in numbers]
    return q, k, v, unscaled, segments


def _blocks(q: Any, k: Any) -> Any:
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes

    sizes = {"block_b": 1} | {
        name: block((q if name.startswith("block_q") else k).shape[1])
        for name in (field.name for field in dataclasses.fields(BlockSizes))
        if name != "block_b"
    }
    return BlockSizes(**sizes)


FLASH = Fused(
    name="flash_attention",
    obstacle=obstacle,
    forward=forward,
    backward=backward,
    bias_bytes=4,
    bias_times=(1, 3),  # backward two kernels read it, and one writes the scores' cotangent
)
