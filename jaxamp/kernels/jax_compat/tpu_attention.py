"""Masks of one's own for JAX's attention kernel for TPUs, and its backward pass: both private."""

from __future__ import annotations

from typing import Any

import numpy as np

SPLASH_WORDS = 1 << 15
"""Keys of which `splash_intervals` can tell two in one number."""


def splash_intervals(start: np.ndarray, stop: np.ndarray, keys: int) -> Any:
    """Return a mask of the keys from one up to another, for each query.

    The kernel computes it, as it does JAX's own causal masks, from one number of each query: so
    that holds both. JAX's ``NumpyMask`` is in the program, block by block.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    class Intervals(masks._ComputableMask):
        def __init__(self) -> None:
            super().__init__((len(start), keys), _is_within)
            self.q_sequence = (start << 16) + stop

        def __eq__(self, other: Any) -> bool:
            return (
                getattr(other, "mask_function", None) is _is_within
                and self.shape == other.shape
                and np.array_equal(self.q_sequence, other.q_sequence)
            )

        def __hash__(self) -> int:
            return hash((self.shape, self.q_sequence.tobytes()))

    return Intervals()


def _is_within(bounds: Any, key: Any) -> Any:
    return (key >= bounds >> 16) & (key < bounds & 0xFFFF)


def splash_backward(
    kernel: Any, segments: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any
) -> Any:
    """Return the cotangents of q, k, v of one ``SplashAttentionKernel`` call, without a batch."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    words = kernel.kwargs
    residuals = (q, k, v, segments, None, out, lse, kernel.dq_mask_info, kernel.dkv_mask_info)
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
