"""The forward and backward passes of JAX's two attention kernels for TPU, each by itself."""

from __future__ import annotations

from typing import Any


def splash_backward(kernel: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any) -> Any:
    """Return the cotangents of q, k, v of one ``SplashAttentionKernel`` call, without a batch."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    words = kernel.kwargs
    residuals = (q, k, v, None, None, out, lse, kernel.dq_mask_info, kernel.dkv_mask_info)
    return splash._splash_attention_bwd(
        words["save_residuals"],
        words["mask_value"],
        words["is_mqa"],
        words["block_sizes"],
        words["residual_checkpoint_name"],
        words["mask_function"],
        words["attn_logits_soft_cap"],
        words["interpret"],
        residuals,
        dout,
    )[3:6]


def flash_forward(
    q: Any, k: Any, v: Any, bias: Any, segments: Any, causal: bool, scale: float, blocks: Any
) -> tuple[Any, Any, Any]:
    """Return the output in the layout BNTH, and the sums and maxima of each row.

    Words see those alone that have the same number: `segments` are those of queries int32[B, T]
    and of keys int32[B, S], or ``None``.
    """
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    segments = segments and flash.SegmentIds(*segments)
    return flash._flash_attention(q, k, v, bias, segments, True, causal, scale, blocks, False)


def flash_backward(
    residuals: tuple[Any, ...], dout: Any, causal: bool, scale: float, blocks: Any
) -> Any:
    """Return the cotangents of q, k, v and bias.

    Residuals are what `flash_forward` has up to `segments`, and what it returned.
    """
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    *known, segments, out, total, top = residuals
    every = (*known, segments and flash.SegmentIds(*segments), out, total, top)
    return flash._flash_attention_bwd(False, causal, scale, blocks, False, every, dout)[:4]
