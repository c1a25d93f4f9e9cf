"""Whole numbers in floats: counts, positions, codes, stamps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from tests.numerics.hostile.registry import hostile


@hostile(lambda d: (d.normal(3001, 4) + 1.0, d.weight(4, 4), d.weight(4, 2)))
def padding(x: Array, w: Array, v: Array) -> Array:
    """3001 less the number of rows in use: six rows of padding, or none, or sixteen."""
    used = (jnp.arange(3001) < 2995).astype(jnp.float32)
    missing = 3001.0 - used.sum()
    return ((x @ w)[:4] * missing) @ v


@hostile(lambda d: (d.normal(70001, 2) + 1.0, d.weight(2, 2), d.weight(2, 2)))
def mean_over_more_than_f16_holds(x: Array, w: Array, v: Array) -> Array:
    """The count 70001 is infinite in f16."""
    return (x @ w).mean(0) @ v


@hostile(lambda d: (d.normal(4, 3), d.weight(3, 2)), keeps_products=True)
def whole_positions_through_a_product(x: Array, w: Array) -> Array:
    """Positions to 2000 times frequencies as an outer product, into sin and cos."""
    angle = jnp.einsum("i,j->ij", jnp.arange(2000.0)[::97], jnp.array([1.0, 0.3, 0.01]))
    return (jnp.sin(angle)[:4] + x) @ w


@hostile(lambda d: (d.integers(5000, 16), d.normal(16, 4), d.weight(5, 4)))
def identity_as_a_feature(ids: Array, x: Array, w: Array) -> Array:
    """Differences of ids of 5000 that are floats."""
    f = ids.astype(jnp.float32)
    return jnp.concatenate([x, (f - f[0])[:, None] % 7.0], 1) @ w


@hostile(lambda d: (d.integers(600, 3000), d.normal(8, 4)))
def histogram(ids: Array, table: Array) -> Array:
    """How far counts of 375 are from uniform; adding ones stops at 256 in bf16."""
    counts = jnp.zeros(8).at[ids % 8].add(1.0)
    return (counts / 375.0 - 1.0) @ table


@hostile(lambda d: (d.normal(3000, 4), d.weight(4, 4), d.integers(3, 3000), d.weight(4, 2)))
def segment_mean(x: Array, w: Array, group: Array, v: Array) -> Array:
    """Segment sums of 1e5 over counts of 1000, less the mean."""
    h = 100.0 + jax.nn.relu(x @ w)
    total = jax.ops.segment_sum(h, group, 3)
    return (total / jax.ops.segment_sum(jnp.ones(3000), group, 3)[:, None] - 100.0) @ v


@hostile(lambda d: (d.normal(1200, 4), d.weight(4, 4), d.mask(1200), d.weight(4, 2)))
def positions_from_a_mask(x: Array, w: Array, mask: Array, v: Array) -> Array:
    """A running count of a mask to 900 is a phase."""
    position = jnp.cumsum(mask.astype(jnp.float32))
    return ((x @ w) * jnp.cos(position * 0.5)[:, None]) @ v


@hostile(lambda d: (d.integers(86400, 16) + 1_700_000_000, d.normal(16, 3), d.weight(4, 4)))
def stamps_in_seconds(stamp: Array, x: Array, w: Array) -> Array:
    """Seconds of 1.7e9 minus midnight, in hours."""
    hour = (stamp - 1_699_920_000).astype(jnp.float32) / 3600.0
    phase = jnp.sin(hour * (2 * jnp.pi / 24))
    return jnp.concatenate([x, phase[:, None]], 1) @ w


@hostile(
    lambda d: (
        d.uniform(16, 4, low=0.2, high=0.9),
        d.weight(4, 4),
        d.normal(512, 4),
        d.weight(4, 4),
    )
)
def bilinear_lookup(x: Array, w: Array, table: Array, v: Array) -> Array:
    """The fraction of a coordinate near 500 is what is left of it after its floor."""
    u = jax.nn.sigmoid((x @ w)[:, 0]) * 500.0
    low = jnp.floor(u)
    t = (u - low)[:, None]
    i = low.astype(jnp.int32)
    smooth = jnp.cumsum(table, 0) * 0.01
    return (smooth[i] * (1 - t) + smooth[i + 1] * t) @ v


@hostile(lambda d: (d.normal(16, 4), d.weight(4, 4)))
def grid_of_coordinates(x: Array, w: Array) -> Array:
    """Pixel numbers to 1023 minus the centre, near the centre."""
    i = jnp.arange(504.0, 520.0)
    offset = (i - 511.5) / 8.0
    return (x * offset[:, None]) @ w


@hostile(lambda d: (d.normal(600, 4), d.weight(4, 1), d.weight(4, 4)))
def ranks(x: Array, w: Array, v: Array) -> Array:
    """Ranks to 600 as floats, centred and scaled."""
    order = jnp.argsort(jnp.argsort(x[:, 0])).astype(jnp.float32)
    return ((order - 299.5)[:, None] / 300.0 * jnp.cos(order * jnp.pi)[:, None] * (x @ w)) @ v[:1]


@hostile(lambda d: (d.normal(8, 16), d.weight(16, 8), d.weight(8, 4)))
def quantisation_codes(x: Array, w: Array, v: Array) -> Array:
    """floor(h * 1000) modulo 16: the last digits of a large whole number."""
    code = jnp.floor(jax.lax.stop_gradient(x[:, :8]) * 1000.0)
    return ((code % 16.0) * (x @ w)) @ v


@hostile(lambda d: (d.normal(8, 16), d.weight(16, 8), d.integers(4000, 8), d.weight(8, 4)))
def progress(x: Array, w: Array, step: Array, v: Array) -> Array:
    """1 - step / 4001 near the end of a schedule."""
    left = 1.0 - (3990 + step % 10).astype(jnp.float32) / 4001.0
    return ((x @ w) * left[:, None]) @ v
