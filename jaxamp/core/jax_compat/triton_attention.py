"""JAX's own Pallas attention for GPUs, in Triton: its forward pass and its backward rule."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def triton_forward(
    q: Any, k: Any, v: Any, scale: float, causal: bool, blocks: dict[str, int]
) -> tuple[Any, Any]:
    """Return the output in the layout BTNH, and the log-sum-exp of the scores to base two."""
    from jax.experimental.pallas.ops.gpu import attention as calls

    words: dict[str, Any] = {"sm_scale": scale, "causal": causal, "return_residuals": True}
    return calls.mha(q, k, v, None, block_sizes=calls.BlockSizes(**blocks), **words)


def triton_backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    scale: float,
    causal: bool,
    blocks: dict[str, int],
) -> tuple[Any, Any, Any]:
    """Return the cotangents of q, k and v.

    The kernel multiplies the output with its cotangent in their own type, so it is given the first
    in float32.
    """
    from jax.experimental.pallas.ops.gpu import attention as calls

    residuals = (q, k, v, None, out.astype(jnp.float32), lse)
    sizes = calls.BlockSizes(**blocks)
    words = (sizes, "triton", None, 2, None, False, False, False)
    return calls._mha_backward(scale, causal, *words, residuals, dout)[:3]
