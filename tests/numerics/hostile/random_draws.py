"""Random numbers whose tails and thresholds need all bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from tests.numerics.hostile.registry import hostile
from tests.programs.registry import Args, Draw


def _layers(d: Draw) -> Args:
    return d.normal(64, 16), d.weight(16, 32), d.weight(32, 4), 7


@hostile(_layers)
def normal_tails(x: Array, w: Array, v: Array, seed: int) -> Array:
    """erf_inv near 1: the tail of a normal ends at 2.9 with bf16 bits, or at inf."""
    noise = jax.random.normal(jax.random.key(seed), (64, 32))
    return (x @ w + noise) @ v


@hostile(_layers)
def gumbel_softmax(x: Array, w: Array, v: Array, seed: int) -> Array:
    """-log(-log(u)) with u to 1e-38 and 1 - 6e-8."""
    g = jax.random.gumbel(jax.random.key(seed), (64, 32))
    return jax.nn.softmax((x @ w + g) / 0.5) @ v


@hostile(_layers)
def rare_events(x: Array, w: Array, v: Array, seed: int) -> Array:
    """u > 0.997: a uniform number rounded to 8 bits is 1 too often."""
    hit = jax.random.uniform(jax.random.key(seed), (64, 32)) > 0.997
    return (jnp.where(hit, 10.0, 0.1) * (x @ w)) @ v


@hostile(_layers)
def dropout(x: Array, w: Array, v: Array, seed: int) -> Array:
    """A mask of 0.9 and a division by it."""
    kept = jax.random.bernoulli(jax.random.key(seed), 0.9, (64, 32))
    return jnp.where(kept, jax.nn.relu(x @ w) / 0.9, 0.0) @ v


@hostile(_layers)
def reparametrised(x: Array, w: Array, v: Array, seed: int) -> Array:
    """Small noise exp(h / 2 - 4) times a normal, about a mean."""
    h = x @ w
    return (h + jnp.exp(0.5 * h - 4.0) * jax.random.normal(jax.random.key(seed), h.shape)) @ v


@hostile(_layers)
def exponential_draws(x: Array, w: Array, v: Array, seed: int) -> Array:
    """-log1p(-u) with u of 24 bits."""
    wait = jax.random.exponential(jax.random.key(seed), (64, 32))
    return (wait * (x @ w)) @ v


@hostile(_layers)
def truncated_normal(x: Array, w: Array, v: Array, seed: int) -> Array:
    """erf_inv between two bounds in the tail."""
    noise = jax.random.truncated_normal(jax.random.key(seed), 2.0, 4.0, (64, 32))
    return (noise * (x @ w)) @ v


@hostile(
    lambda d: (d.normal(64, 16), d.weight(16, 32), d.weight(32, 4), d.integers(2**31 - 1, 64, 32))
)
def fractions_of_bits(x: Array, w: Array, v: Array, bits: Array) -> Array:
    """Integers over 2**31 are 1 where they are rounded up; log(1 - u) is -inf there."""
    u = bits.astype(jnp.float32) / 2.0**31 * 0.999999
    return (-jnp.log(1.0 - u) * (x @ w)) @ v
