"""Sine and cosine of large phases."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from tests.numerics.hostile.registry import hostile


def _rotate(x: Array, angle: Array) -> Array:
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1
    )


def _frequencies(count: int) -> Array:
    return 10000.0 ** (-jnp.arange(count, dtype=jnp.float32) / count)


@hostile(lambda d: (d.normal(16, 8), d.weight(8, 8), d.weight(8, 8)))
def rotary(x: Array, wq: Array, wk: Array) -> Array:
    """Rotary positions near 4000: an angle rounded to bf16 is off by 16."""
    angle = (4000.0 + jnp.arange(16.0))[:, None] * _frequencies(4)
    return _rotate(x @ wq, angle) @ _rotate(x @ wk, angle).T


@hostile(
    lambda d: (d.normal(16, 8), d.weight(8, 8), d.weight(8, 8), d.integers(9000, 16)),
    keeps_products=True,
)
def rotary_by_an_outer_product(x: Array, wq: Array, wk: Array, position: Array) -> Array:
    """The same with positions as an input and the angles made by `einsum`."""
    angle = jnp.einsum("i,j->ij", position.astype(jnp.float32), _frequencies(4))
    return _rotate(x @ wq, angle) @ _rotate(x @ wk, angle).T


@hostile(lambda d: (d.normal(16, 8), d.weight(8, 8), d.weight(8, 4)))
def sinusoidal(x: Array, w: Array, v: Array) -> Array:
    """Sinusoidal positions to 4000 added to a product."""
    angle = jnp.arange(0.0, 4000.0, 250.0)[:, None] * _frequencies(4)
    return (x @ w + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)) @ v


@hostile(lambda d: (d.uniform(16), d.weight(8, 8), d.weight(8, 4)))
def diffusion_time(t: Array, w: Array, v: Array) -> Array:
    """Time in [0, 1] times 1000 is a phase, then a two-layer network."""
    angle = (1000.0 * t)[:, None] * _frequencies(4)
    h = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1) @ w
    return jnp.tanh(h) @ v


@hostile(lambda d: (d.normal(16, 8), d.weight(8, 8), d.weight(8, 4)))
def sine_network(x: Array, w: Array, v: Array) -> Array:
    """sin(30 h): the product's own rounding is all that may show."""
    return jnp.sin(30.0 * (x @ w)) @ v


@hostile(lambda d: (d.uniform(16, 3, low=-4.0, high=4.0), d.weight(3, 8), d.weight(16, 4)))
def fourier_features(x: Array, b: Array, v: Array) -> Array:
    """sin and cos of 2 pi x b."""
    angle = 2 * jnp.pi * (x @ b)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1) @ v


@hostile(lambda d: (d.uniform(16, 4, low=900.0, high=1000.0), d.normal(16, 4), d.weight(4, 4)))
def wrapped_angle(a: Array, x: Array, w: Array) -> Array:
    """An angle near 1000 modulo 2 pi scales an activation."""
    return (jnp.sin(jnp.mod(a, 2 * jnp.pi)) * (x @ w)) @ w


@hostile(lambda d: (d.normal(16, 4), d.weight(4, 4), d.uniform(16, low=0.0, high=60.0)))
def clock_features(x: Array, w: Array, seconds: Array) -> Array:
    """A clock near 5000 s, in radians of a minute, gates an activation."""
    t = 5000.0 + seconds
    return ((x @ w) * jnp.cos(t * (2 * jnp.pi / 60.0))[:, None]) @ w
