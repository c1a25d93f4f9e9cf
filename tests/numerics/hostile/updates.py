"""Updates far smaller than what they update; the update itself is returned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tests.numerics.hostile.registry import hostile
from tests.programs.registry import Args, Draw


def _training(d: Draw) -> Args:
    return d.normal(32, 8), d.weight(8, 8), d.weight(8, 4), d.normal(32, 4)


def _gradient(x: Array, w: Array, v: Array, y: Array) -> Array:
    return jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) @ v - y) ** 2))(w)


@hostile(_training)
def gradient_descent(x: Array, w: Array, v: Array, y: Array) -> Array:
    """w - 1e-5 g: w itself, in low precision."""
    return (w - 1e-5 * _gradient(x, w, v, y)) - w


@hostile(_training)
def weight_decay(x: Array, w: Array, v: Array, y: Array) -> Array:
    """w - 1e-4 (g + 0.01 w)."""
    return (w - 1e-4 * (_gradient(x, w, v, y) + 0.01 * w)) - w


@hostile(_training)
def step_then_forward(x: Array, w: Array, v: Array, y: Array) -> tuple[Array, Array]:
    """An inner step of 1e-3 and the loss after it: the new weight is used and returned."""
    new = w - 1e-3 * _gradient(x, w, v, y)
    return new - w, jnp.tanh(x @ new) @ v


@hostile(lambda d: (*_training(d), d.weight(8, 8)))
def average_of_weights(x: Array, w: Array, v: Array, y: Array, mean: Array) -> Array:
    """0.9999 m + 0.0001 w: 0.9999 is 1 in both formats."""
    new = w - 1e-2 * _gradient(x, w, v, y)
    return (0.9999 * mean + (1 - 0.9999) * new) - mean


@hostile(lambda d: (*_training(d), d.uniform(8, 8, low=1e-6, high=2e-6)))
def second_moment(x: Array, w: Array, v: Array, y: Array, nu: Array) -> tuple[Array, Array]:
    """0.999 v + 0.001 g² of 1e-6, then g / (sqrt(v) + 1e-8)."""
    g = _gradient(x, w, v, y)
    new = 0.999 * nu + 0.001 * g * g
    return new, (w - 1e-4 * g / (jnp.sqrt(new / (1 - 0.999**1000)) + 1e-8)) - w


@hostile(lambda d: (d.normal(256, 4, 8), d.weight(8, 8), d.weight(8, 4), d.normal(256, 4, 4)))
def accumulated_gradients(x: Array, w: Array, v: Array, y: Array) -> Array:
    """256 gradients of small batches are added up."""

    def add(total: Array, batch: tuple[Array, Array]) -> tuple[Array, None]:
        return total + _gradient(batch[0], w, v, batch[1]), None

    return lax.scan(add, jnp.zeros_like(w), (x, y))[0] / 256.0


@hostile(lambda d: (d.normal(32, 8) + 1.0, d.weight(8, 8), d.weight(8, 4), d.uniform(8)))
def running_statistics(x: Array, w: Array, v: Array, mean: Array) -> tuple[Array, Array]:
    """0.999 m + 0.001 batch mean is returned, and used by the layer."""
    h = x @ w
    new = 0.999 * mean + 0.001 * h.mean(0)
    return (new - mean) * 1000.0, (h - new) @ v


@hostile(lambda d: (d.normal(32, 8), d.weight(8, 8), d.weight(8, 4), d.normal(32, 4)))
def momentum_in_a_scan(x: Array, w: Array, v: Array, y: Array) -> Any:
    """500 steps of momentum at 1e-5: weight and momentum are carries."""

    def step(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], Array]:
        w_, m = carry
        m = 0.99 * m + _gradient(x, w_, v, y)
        return (w_ - 1e-5 * m, m), jnp.sum(m * m)

    (new, m), norms = lax.scan(step, (w, jnp.zeros_like(w)), None, length=500)
    return 1e2 * (new - w), m, norms


@hostile(lambda d: (d.normal(4, 8), d.weight(8, 8), d.weight(8, 4), d.normal(4, 4)))
def fast_weights(x: Array, w: Array, v: Array, y: Array) -> Array:
    """200 outer products of 1e-3 are added to a weight that is read each time."""

    def step(fast: Array, _: None) -> tuple[Array, None]:
        out = x @ fast
        return 0.999 * fast + 1e-3 * x.T @ (jnp.tanh(out @ v) - y) @ v.T, None

    return lax.scan(step, w, None, length=200)[0]
