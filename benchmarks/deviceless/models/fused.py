"""Attention by hand with the kernel that an expert calls on a chip, cuDNN or splash attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn

FUSED = "hand, fused attention"
_platform: ContextVar[str] = ContextVar("platform", default="cpu")


@contextmanager
def tracing_for(platform: str) -> Iterator[None]:
    """Trace hands for a platform whose device is here."""
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


@contextmanager
def on(platform: str) -> Iterator[None]:
    """Trace hands for a platform whose device is not here: JAX asks for a GPU, and is answered."""
    answers = {
        "check_cudnn_version": 91200,
        "check_compute_capability": True,
        "is_cuda_compute_capability_equal": False,
    }
    with tracing_for(platform), ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(cudnn, name, return_value=answer))
        yield


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, bias: jax.Array | None = None
) -> jax.Array:
    """Attend, from [B, T, N, H] to [B, T, N, H]; as XLA has it where no kernel takes the shape."""
    if _platform.get() == "tpu" and q.shape[1] % 128 == 0 and bias is None:
        return _splash(q, k, v, causal)
    words: Any = "cudnn" if _platform.get() == "cuda" else "xla"
    return jax.nn.dot_product_attention(q, k, v, bias, is_causal=causal, implementation=words)


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, length, heads, size = q.shape
    shape = (length, length)
    mask: Any = splash.CausalMask(shape) if causal else splash.FullMask(shape)
    block = min(512, length)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    kernel: Any = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(names, block)),
        head_shards=1,
        q_seq_shards=1,
    )
    by_heads = (jnp.swapaxes(x, 1, 2) for x in (q * jnp.asarray(size**-0.5, q.dtype), k, v))
    return jnp.swapaxes(jax.vmap(kernel)(*by_heads), 1, 2)
