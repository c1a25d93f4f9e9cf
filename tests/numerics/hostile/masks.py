"""Masks: constants near the end of float32, rows with nothing left, biases by distance."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tests.numerics.hostile.registry import hostile
from tests.programs.registry import Args, Draw

_BIG = float(jnp.finfo(jnp.float32).min)


def _attention(d: Draw) -> Args:
    return d.normal(8, 16), d.normal(8, 16), d.normal(8, 4), d.mask(8, 8) | np.eye(8, dtype=bool)


def _with_masked_row(d: Draw) -> Args:
    q, k, v, mask = _attention(d)
    mask[3] = False
    return q, k, v, mask


def _scores(q: Array, k: Array) -> Array:
    return q @ k.T / jnp.sqrt(jnp.float32(q.shape[-1]))


@hostile(_attention)
def additive_mask(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """(1 - m) * -1e9 is 0 * -inf = NaN in f16."""
    bias = (1.0 - mask.astype(jnp.float32)) * -1e9
    return jax.nn.softmax(_scores(q, k) + bias) @ v


@hostile(_with_masked_row)
def additive_mask_of_a_whole_row(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """A row of -1e30 is uniform in float32; -inf - -inf is NaN."""
    return jax.nn.softmax(_scores(q, k) + jnp.where(mask, 0.0, -1e30)) @ v


@hostile(_with_masked_row)
def where_finfo_min(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """finfo(float32).min rounds to -inf in both formats; a full row of it is NaN."""
    return jax.nn.softmax(jnp.where(mask, _scores(q, k), _BIG)) @ v


@hostile(_with_masked_row)
def half_of_finfo_min(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """-0.7 * finfo.max as flax and haiku write it; -inf in f16, and a row of it NaN."""
    bias = lax.select(mask, jnp.zeros(mask.shape), jnp.full(mask.shape, 0.7 * _BIG))
    s = _scores(q, k) + bias
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)) @ v


@hostile(_with_masked_row)
def row_with_nothing_left(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """A row of -inf is guarded by a `where`; the guard must see the same infinities."""
    s = jnp.where(mask, _scores(q, k), -jnp.inf)
    top = s.max(-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    e = jnp.exp(s - top)
    return (e / jnp.maximum(e.sum(-1, keepdims=True), 1e-30)) @ v


@hostile(lambda d: (d.normal(6, 16), d.normal(700, 16), d.normal(700, 4)))
def bias_by_distance(q: Array, k: Array, v: Array) -> Array:
    """Distances to 700 do not fit bf16; a slope makes them logits."""
    distance = jnp.arange(700.0)[None, :] - 100.0 * jnp.arange(6.0)[:, None]
    return jax.nn.softmax(_scores(q, k) - 0.11 * jnp.abs(distance)) @ v


@hostile(lambda d: (d.normal(8, 64, scale=60.0), d.normal(8, 64, scale=60.0), d.normal(8, 4)))
def logits_scaled_after_the_product(q: Array, k: Array, v: Array) -> Array:
    """q k^T passes 65504 before it is divided."""
    return (q @ k.T / 64.0 / 60.0) @ v


def _groups(d: Draw) -> Args:
    mask = d.mask(6, 8)
    mask[2] = False
    return d.normal(8, 16), d.weight(16, 4), mask, d.weight(4, 4)


@hostile(_groups)
def masked_mean(x: Array, w: Array, mask: Array, v: Array) -> Array:
    """An empty group divides by 1e-8, which is 0 in f16."""
    m = mask.astype(jnp.float32)
    mean = (m[:, :, None] * (x @ w)).sum(1) / (m.sum(1, keepdims=True) + 1e-8)
    return mean @ v


@hostile(lambda d: (d.normal(4, 16), d.normal(200, 8, 16), d.normal(200, 8, 4)))
def online_softmax(q: Array, k: Array, v: Array) -> Array:
    """A running maximum from -inf and a running sum over 200 blocks."""

    def block(carry: tuple[Array, Array, Array], kv: tuple[Array, Array]) -> tuple:
        top, total, acc = carry
        s = _scores(q, kv[0])
        new = jnp.maximum(top, s.max(-1))
        scale, p = jnp.exp(top - new), jnp.exp(s - new[:, None])
        return (new, total * scale + p.sum(-1), acc * scale[:, None] + p @ kv[1]), None

    init = (jnp.full(4, -jnp.inf), jnp.zeros(4), jnp.zeros((4, 4)))
    (_, total, acc), _ = lax.scan(block, init, (k, v))
    return acc / total[:, None]


@hostile(
    lambda d: (d.normal(4, 16), d.normal(200, 8, 16), d.normal(200, 8, 4) + 1.0, d.weight(4, 4))
)
def online_softmax_then_projection(q: Array, k: Array, v: Array, w: Array) -> Array:
    """The same with the accumulators on their way to a product."""
    return online_softmax(q, k, v) @ w


@hostile(lambda d: (d.normal(8, 16), d.normal(8, 16), d.normal(8, 4)))
def distance_decay(q: Array, k: Array, v: Array) -> Array:
    """0.999 ** (i - j) masks a linear attention: 0.999 is 1 in bf16."""
    i = jnp.arange(8.0) * 40.0
    decay = jnp.where(i[:, None] >= i, 0.999 ** (i[:, None] - i), 0.0)
    return (_scores(q, k) * decay) @ v


@hostile(lambda d: (d.normal(8, 16), d.weight(16, 32), d.normal(8, 4)))
def entropy_of_the_top_logits(x: Array, w: Array, v: Array) -> Array:
    """Logits below the fourth become -1e10: p log p is 0 * -1e10 = 0, but 0 * -inf = NaN."""
    s = x @ w
    least = lax.top_k(s, 4)[0][:, -1:]
    s = jnp.where(s < least, -1e10, s)
    return (jax.nn.softmax(s) * jax.nn.log_softmax(s)).sum(-1) @ v
