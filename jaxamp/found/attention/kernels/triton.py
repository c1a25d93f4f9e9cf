"""Pallas' attention in Triton, for NVIDIA GPUs where cuDNN does not take the operands."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxamp.found.attention.kernels.fused import Fused
from jaxamp.found.attention.kernels.known_masks import KnownMask, Segments
from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands, Results
from jaxamp.kernels.jax_compat.triton_attention import triton_backward, triton_forward
from jaxamp.kernels.target_gpu import TargetGpu

_BLOCK = 32  # of the backward pass, as JAX's own default has it (0.10.2)
_LARGEST_HEAD = 256
_SHARED = 99 << 10  # bytes of a block that each GPU from Ampere on has


def obstacle(gpu: TargetGpu, operands: Operands, spec: AttentionSpec, backward: bool) -> str | None:
    """Return why it does not take these operands on a GPU."""
    q, k, v, bias = operands
    if gpu.capability < (8, 0):
        return f"compute capability {gpu.capability[0]}.{gpu.capability[1]} is below 8.0"
    if q.dtype.itemsize != 2:
        return f"operands are {q.dtype}, not of 16 bits"
    if bias is not None or spec.window is not None:
        return "Triton's attention takes no biases and no windows"
    if spec.mask is not None and not _is_of_words(spec.mask):
        return "Triton's attention takes causal masks and segments of words alone"
    if not q.shape[2] == k.shape[2] == v.shape[2] or q.shape[-1] != v.shape[-1]:
        return "Triton's attention needs a key head for each query head, and values of its size"
    if q.shape[1] != k.shape[1] or q.shape[1] % _BLOCK or 0 in q.shape:
        return f"Triton's attention needs as many queries as keys, a multiple of {_BLOCK}"
    if not 16 <= q.shape[-1] <= _LARGEST_HEAD:
        return f"head size {q.shape[-1]} is not between 16 and {_LARGEST_HEAD}"
    return None


def on(gpu: TargetGpu) -> Fused:
    """Return Triton's attention on a GPU."""
    asked = functools.partial(obstacle, gpu)
    return Fused(name="Triton", obstacle=asked, forward=forward, backward=backward)


def forward(operands: Operands, spec: AttentionSpec) -> tuple[Any, Any]:
    """Compute output and lse."""
    q, k, v, _ = operands
    ids = _segments(q, spec)
    out, lse = triton_forward(q, k, v, ids, spec.scale, spec.causal, _blocks(q))
    return out, lse * math.log(2.0)


def backward(
    operands: Operands, results: Results, spec: AttentionSpec, bias_grad: bool
) -> tuple[Any, ...]:
    """Compute the cotangents."""
    lse = results.lse / jnp.float32(math.log(2.0))
    known = (*operands[:3], _segments(operands.q, spec), results.out, lse, results.dout)
    found = triton_backward(*known, spec.scale, spec.causal, _blocks(operands.q))
    return (*found, None)


def _is_of_words(mask: KnownMask) -> bool:
    """Return whether queries and keys have the same numbers of segments."""
    return isinstance(mask, Segments) and np.array_equal(mask.queries, mask.keys)


def _segments(q: Any, spec: AttentionSpec) -> Any:
    """Return numbers of each example's segments, int32[B, T]; ``None`` without a mask."""
    if not isinstance(spec.mask, Segments):
        return None
    return jnp.broadcast_to(spec.mask.queries, q.shape[:2])


def _blocks(q: Any) -> dict[str, int]:
    """Return sizes of blocks: powers of two that divide the length.

    A block of queries, and two of keys and values each while the next ones load, are in shared
    memory at once, with heads of the next power of two.
    """
    head = 1 << (q.shape[-1] - 1).bit_length()
    fits = [n for n in (64, 128) if q.shape[1] % n == 0 and 5 * n * head * 2 <= _SHARED]
    names = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    rows = max(fits, default=_BLOCK)
    return {"block_q": rows, "block_k": rows, **dict.fromkeys(names, _BLOCK)}
