"""Normalisations between two products, where lowering is worth something."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from tests.programs.registry import Draw, program


def _block(d: Draw) -> tuple:
    return d.normal(4, 8), d.weight(8, 8), d.uniform(8, low=0.5, high=1.5), d.weight(8, 3)


@program(_block, low_dots=2)
def layer_norm(x: Array, w: Array, scale: Array, v: Array) -> Array:
    """LayerNorm by mean and var."""
    h = x @ w
    h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-6)
    return (h * scale) @ v


@program(_block, low_dots=2)
def rms_norm(x: Array, w: Array, scale: Array, v: Array) -> Array:
    """RMSNorm of small values: the squares leave the f16 range."""
    h = 1e-3 * (x @ w)
    return (h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-12) * scale) @ v


@program(_block, low_dots=2)
def batch_norm(x: Array, w: Array, scale: Array, v: Array) -> tuple[Array, dict[str, Array]]:
    """BatchNorm with running statistics returned."""
    h = x @ w
    mean, var = h.mean(0), h.var(0)
    y = (h - mean) / jnp.sqrt(var + 1e-5) * scale
    return y @ v, {"mean": 0.9 * scale + 0.1 * mean, "var": 0.9 * scale + 0.1 * var}


@program(_block, low_dots=2)
def group_norm(x: Array, w: Array, scale: Array, v: Array) -> Array:
    """GroupNorm with `jax.nn.standardize`."""
    h = jax.nn.standardize((x @ w).reshape(4, 2, 4), axis=-1, epsilon=1e-5)
    return (h.reshape(4, 8) * scale) @ v


@program(lambda d: (d.normal(4, 8), d.normal(5, 8), d.weight(8, 8)), low_dots=3)
def cosine_similarity(a: Array, b: Array, w: Array) -> Array:
    """L2 norms with an epsilon that is zero in f16."""
    a, b = a @ w, b @ w
    a = a / (jnp.linalg.norm(a, axis=-1, keepdims=True) + 1e-12)
    b = b / (jnp.linalg.norm(b, axis=-1, keepdims=True) + 1e-12)
    return a @ b.T


@program(lambda d: (d.normal(4, 8), d.weight(8, 8)), low_dots=1)
def norm_of_zeros(x: Array, w: Array) -> Array:
    """Normalising a zero row stays finite because of its epsilon."""
    h = jnp.concatenate([x @ w, jnp.zeros((1, 8))])
    return h * lax.rsqrt(jnp.mean(jnp.square(h), -1, keepdims=True) + 1e-8)


@program(_block, low_dots=2)
def softmax_temperature(x: Array, w: Array, scale: Array, v: Array) -> Array:
    """A soft gate between products."""
    return jax.nn.softmax((x @ w) * 10.0 * scale, axis=-1) @ v


@program(lambda d: (d.normal(4, 8), d.weight(8, 6)), low_dots=1)
def mean_of_many(x: Array, w: Array) -> tuple[Array, Array]:
    """A mean over more terms than f16 can count."""
    h = x @ w
    wide = jnp.broadcast_to(h[:, :, None], (4, 6, 3000))
    return wide.mean(), h.std()
