"""Small constants that keep a division or logarithm finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from tests.numerics.hostile.registry import hostile
from tests.programs.registry import Args, Draw


def _with_zero_row(d: Draw) -> Args:
    x = d.normal(8, 16)
    x[2] = 0.0
    return x, d.weight(16, 16), d.weight(16, 4)


def _tiny(d: Draw) -> Args:
    return d.normal(8, 16, scale=1e-4), d.weight(16, 16), d.weight(16, 4)


def _plain(d: Draw) -> Args:
    return d.normal(8, 16), d.weight(16, 16), d.weight(16, 4)


@hostile(_with_zero_row)
def rms_norm_of_zero(x: Array, w: Array, v: Array) -> Array:
    """1e-8 is 0 in f16: 0 * rsqrt(0) is NaN."""
    h = x @ w
    return (h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-8)) @ v


@hostile(_tiny)
def rms_norm_of_small(x: Array, w: Array, v: Array) -> Array:
    """Squares of 1e-4 vanish in f16."""
    h = x @ w
    return (h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-12)) @ v


@hostile(_with_zero_row)
def norm_plus_epsilon(x: Array, w: Array, v: Array) -> Array:
    """h / (|h| + 1e-12) at h = 0."""
    h = x @ w
    return (h / (jnp.linalg.norm(h, axis=-1, keepdims=True) + 1e-12)) @ v


@hostile(_with_zero_row)
def norm_at_least_epsilon(x: Array, w: Array, v: Array) -> Array:
    """h / max(|h|, 1e-12) at h = 0."""
    h = x @ w
    return (h / jnp.maximum(jnp.sqrt((h * h).sum(-1, keepdims=True)), 1e-12)) @ v


@hostile(_plain)
def log_of_relu(x: Array, w: Array, v: Array) -> Array:
    """log(relu(h) + 1e-8) is -inf where 1e-8 is 0."""
    return jnp.log(jax.nn.relu(x @ w) + 1e-8) @ v


@hostile(lambda d: (d.normal(8, 16, scale=8.0), d.weight(16, 16), d.weight(16, 4)))
def clipped_probability(x: Array, w: Array, v: Array) -> Array:
    """clip(p, 1e-7, 1 - 1e-7): 1 - 1e-7 is 1 in both formats, and log(1 - p) is -inf."""
    p = jnp.clip(jax.nn.sigmoid(x @ w), 1e-7, 1 - 1e-7)
    return (jnp.log(p) + jnp.log(1 - p)) @ v


@hostile(lambda d: (d.normal(8, 16, scale=8.0), d.weight(16, 4), d.integers(2, 8, 4)))
def cross_entropy_of_clipped(x: Array, w: Array, y: Array) -> Array:
    """The same as a loss, with its gradient."""

    def loss(w: Array) -> Array:
        p = jnp.clip(jax.nn.sigmoid(x @ w), 1e-7, 1 - 1e-7)
        return -jnp.mean(y * jnp.log(p) + (1 - y) * jnp.log(1 - p))

    return jax.grad(loss)(w)


@hostile(lambda d: (d.normal(8, 16, scale=4.0), d.weight(16, 16), d.weight(8, 4)))
def entropy(x: Array, w: Array, v: Array) -> Array:
    """-p log(p + 1e-12) with probabilities that vanish."""
    p = jax.nn.softmax(x @ w)
    return (-p * jnp.log(p + 1e-12)).sum(-1) @ v


@hostile(_plain)
def constant_rows(x: Array, w: Array, v: Array) -> Array:
    """A variance of 0 with an epsilon of 1e-10."""
    h = (x @ w)[:, :1] * jnp.ones(16)
    centred = h - h.mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-10) + h) @ v


@hostile(lambda d: (d.normal(8, 16), d.weight(16, 8), d.weight(8, 4)))
def optimal_transport(x: Array, w: Array, v: Array) -> Array:
    """Twenty rounds of row and column scaling of exp(h / 0.3 - 16), which f16 does not hold."""
    kernel = jnp.exp((x @ w) / 0.3 - 16.0)

    def scale(_: int, p: Array) -> Array:
        p = p / (p.sum(0, keepdims=True) + 1e-30)
        return p / (p.sum(1, keepdims=True) + 1e-30)

    return jax.lax.fori_loop(0, 20, scale, kernel) @ v


@hostile(lambda d: (d.normal(8, 16, scale=1e-5), d.weight(16, 16), d.weight(16, 4)))
def normalised_by_root_mean_square(x: Array, w: Array, v: Array) -> Array:
    """g / (sqrt(g²) + 1e-8) with g of 1e-5, as Adam's first step does."""
    g = x @ w
    return (g / (jnp.sqrt(jnp.mean(g * g, 0)) + 1e-8)) @ v


@hostile(lambda d: (d.normal(8, 3), d.weight(3, 3), d.weight(8, 4)))
def inverse_square_law(x: Array, w: Array, v: Array) -> Array:
    """1 / (d² + 1e-8) between points, themselves included: 0 / 0 in f16."""
    p = x @ w
    d2 = ((p[:, None] - p[None]) ** 2).sum(-1)
    return (1e-8 / (d2 + 1e-8)) @ v


@hostile(_plain)
def variance_of_a_likelihood(x: Array, w: Array, v: Array) -> Array:
    """softplus(h - 12) + 1e-6 is a variance, and its inverse a weight."""
    var = jax.nn.softplus(x @ w - 12.0) + 1e-6
    return (1e-5 / var) @ v
