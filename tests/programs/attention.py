"""Attention with the masks that people write."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from tests.programs.registry import Draw, program


def _qkv(d: Draw) -> tuple:
    return d.normal(2, 6, 8), d.normal(2, 6, 8), d.normal(2, 6, 8)


def _qkv_mask(d: Draw) -> tuple:
    mask = d.mask(2, 6, 6)
    mask[..., 0] = True
    return *_qkv(d), mask


def _weigh(scores: Array, v: Array) -> Array:
    return jax.nn.softmax(scores, axis=-1) @ v


def _scores(q: Array, k: Array) -> Array:
    return q @ k.mT / jnp.sqrt(q.shape[-1])


@program(_qkv, low_dots=2)
def attention_causal(q: Array, k: Array, v: Array) -> Array:
    """A lower triangle and -1e30."""
    return _weigh(jnp.where(jnp.tril(jnp.ones((6, 6), bool)), _scores(q, k), -1e30), v)


@program(_qkv_mask, low_dots=2)
def attention_finfo_min(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """The smallest float32 in the masked places."""
    return _weigh(jnp.where(mask, _scores(q, k), jnp.finfo(jnp.float32).min), v)


@program(_qkv_mask, low_dots=2)
def attention_minus_inf(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Minus infinity in the masked places, at least one place open in a row."""
    return _weigh(jnp.where(mask, _scores(q, k), -jnp.inf), v)


@program(_qkv_mask, low_dots=2)
def attention_additive(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """The additive mask `(1 - m) * -1e9`."""
    return _weigh(_scores(q, k) + (1.0 - mask.astype(jnp.float32)) * -1e9, v)


@program(_qkv, low_dots=2)
def attention_row_all_masked(q: Array, k: Array, v: Array) -> Array:
    """A row with nothing to attend to must not become NaN."""
    mask = jnp.arange(6)[:, None] > jnp.arange(6)[None]
    return _weigh(_scores(q, k) + jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min), v)


@program(_qkv, low_dots=2)
def attention_by_hand(q: Array, k: Array, v: Array) -> Array:
    """Softmax spelled out."""
    s = _scores(q, k)
    e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    return (e / e.sum(-1, keepdims=True)) @ v


@program(lambda d: (d.normal(2, 6, 2, 4), d.normal(2, 6, 2, 4), d.normal(2, 6, 2, 4)), low_dots=2)
def attention_library(q: Array, k: Array, v: Array) -> Array:
    """`jax.nn.dot_product_attention`, causal."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@program(
    lambda d: (d.normal(2, 6, 8), d.weight(8, 24), d.weight(8, 8)), low_dots=4, tolerance="deep"
)
def attention_multi_head(x: Array, w_qkv: Array, w_out: Array) -> Array:
    """Self-attention with projections, heads and rotary positions past 256."""
    b, t, c = x.shape
    q, k, v = jnp.split(x @ w_qkv, 3, axis=-1)
    q, k, v = (y.reshape(b, t, 2, c // 2).transpose(0, 2, 1, 3) for y in (q, k, v))
    angle = (jnp.arange(t) + 1000.0)[:, None] * 10.0 ** -jnp.arange(c // 4)
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    def rotate(y: Array) -> Array:
        a, b = jnp.split(y, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    y = _weigh(_scores(rotate(q), rotate(k)), v)
    return y.transpose(0, 2, 1, 3).reshape(b, t, c) @ w_out


@program(lambda d: (*_qkv(d), 7), low_dots=2)
def attention_dropout(q: Array, k: Array, v: Array, seed: int) -> Array:
    """Dropped attention weights: the same places as in float32."""
    p = jax.nn.softmax(_scores(q, k), axis=-1)
    keep = jax.random.bernoulli(jax.random.key(seed), 0.8, p.shape)
    return jnp.where(keep, p / 0.8, 0.0) @ v
