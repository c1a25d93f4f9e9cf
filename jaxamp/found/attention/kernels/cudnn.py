"""cuDNN's attention for NVIDIA GPUs, through JAX's own call."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxamp.found.attention.kernels.fused import Fused
from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands
from jaxamp.kernels.jax_compat.cudnn_calls import (
    cudnn_backward,
    cudnn_forward,
    cudnn_lowest,
    cudnn_refusal,
)
from jaxamp.kernels.target_gpu import TargetGpu

NEWEST = TargetGpu(capability=(9, 0), cudnn=91200)
"""A GPU that takes every shape that any takes."""


def obstacle(gpu: TargetGpu, operands: Operands, spec: AttentionSpec, backward: bool) -> str | None:
    """Return why cuDNN does not take these operands on a GPU, by JAX's own checks."""
    q, k, v, bias, *_ = operands
    if gpu.capability < (8, 0):
        return f"compute capability {gpu.capability[0]}.{gpu.capability[1]} is below 8.0"
    if gpu.cudnn is None:
        return "there is no cuDNN"
    if 0 in q.shape + k.shape:
        return "there is nothing to attend to"
    if spec.mask is not None:
        return "cuDNN takes causal masks and windows alone"
    if bias is not None:
        bias = jax.ShapeDtypeStruct((*bias.shape[:2], q.shape[1], k.shape[1]), q.dtype)
    if q.dtype.itemsize != 2:
        return f"operands are {q.dtype}, not of 16 bits"
    return cudnn_refusal((q, k, v, bias), backward, gpu)


def on(gpu: TargetGpu) -> Fused:
    """Return cuDNN's attention on a GPU."""
    asked = functools.partial(obstacle, gpu)
    return Fused(name="cuDNN", obstacle=asked, run=run)


def run(operands: Operands, spec: AttentionSpec, bias_grad: bool) -> tuple[Any, ...]:
    """Compute output and lse, or the cotangents; that of a bias over all queries and keys."""
    *given, out, lse, dout = _narrowed(operands)
    if dout is None:
        return cudnn_forward(given, spec)
    return (*cudnn_backward(given, (out, lse, dout), spec, bias_grad), None)[:4]


def _narrowed(operands: Operands) -> Operands:
    """Return operands with the bias as cuDNN reads it: in the others' dtype, and finite.

    See: ``get_large_negative_number`` in jax/_src/cudnn/fused_attention_stablehlo.py, JAX 0.10.2.
    """
    q, k, _, bias, *_ = operands
    if bias is None:
        return operands
    least = cudnn_lowest(q.dtype)
    shape = (*bias.shape[:2], q.shape[1], k.shape[1])  # it broadcasts over neither
    finite = jnp.clip(bias, least, -least).astype(q.dtype)
    return operands._replace(bias=jnp.broadcast_to(finite, shape))
