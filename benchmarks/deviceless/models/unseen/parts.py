"""What these models share: parameters that follow their activations, norms, attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.deviceless.models import fused
from benchmarks.deviceless.models.fused import FUSED
from benchmarks.deviceless.models.model import HAND, Size

LOW, WIDE = jnp.bfloat16, jnp.float32
SUMS = "hand, float32 sums"
"""A hand that adds up cotangents in float32, as jaxamp does, where the others round them first."""
Attend = Callable[..., jax.Array]


def wide(x: jax.Array) -> jax.Array:
    """In float32 at least."""
    return x.astype(jnp.promote_types(x.dtype, WIDE))


def dense(p: Any, x: jax.Array) -> jax.Array:
    """A linear layer, with or without a bias."""
    y = x @ p["w"].astype(x.dtype)
    return y + p["b"].astype(x.dtype) if "b" in p else y


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    y = wide(x)
    return (y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def layer_norm(p: Any, x: jax.Array) -> jax.Array:
    """Over the last axis; without a scale and a bias where ``p`` is empty."""
    y = wide(x)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
    return (y * p["scale"] + p["bias"] if p else y).astype(x.dtype)


def linear(draw: Any, inputs: int, outputs: int, bias: bool = True) -> dict[str, jax.Array]:
    w = {"w": draw(inputs, outputs)}
    return w | {"b": jnp.zeros(outputs)} if bias else w


def norm_params(width: int) -> dict[str, jax.Array]:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def composed(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, bias: jax.Array | None = None
) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, bias, is_causal=causal, implementation="xla")


def heads(x: jax.Array, size: int) -> jax.Array:
    """From [..., C] to [..., heads, size]."""
    return x.reshape(*x.shape[:-1], -1, size)


def flat(x: jax.Array) -> jax.Array:
    """From [..., heads, size] to [..., C]."""
    return x.reshape(*x.shape[:-2], -1)


def size(init: Any, sample: Any, loss: Any, *, gradient: bool = True) -> Size:
    """A size of ``loss(dtype, params, batch)``."""
    return Size(init, sample, partial(loss, WIDE), {HAND: partial(loss, LOW)}, gradient)


def attending(init: Any, sample: Any, loss: Any) -> Size:
    """A size of ``loss(dtype, attend, params, batch)``."""
    hands = {HAND: partial(loss, LOW, composed), FUSED: partial(loss, LOW, fused.attention)}
    return Size(init, sample, partial(loss, WIDE, composed), hands)
