"""Gather, scatter, sort and slices beside products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from tests.programs.registry import program


@program(lambda d: (d.normal(10, 8), d.integers(10, 6), d.weight(8, 4)), low_dots=1)
def embedding(table: Array, tokens: Array, w: Array) -> Array:
    """Rows gathered from a table, then a product."""
    return table[tokens] @ w


@program(lambda d: (d.normal(6, 8), d.weight(8, 4), d.integers(3, 6)), low_dots=1)
def segment_sum(x: Array, w: Array, segments: Array) -> Array:
    """Sums by segment: many terms into few places."""
    return jax.ops.segment_sum(x @ w, segments, num_segments=3)


@program(lambda d: (d.normal(6, 8), d.weight(8, 4), d.integers(5, 6)), low_dots=1)
def scatter_modes(x: Array, w: Array, rows: Array) -> tuple[Array, ...]:
    """Scatter add, multiply, max and set."""
    h, base = x @ w, jnp.ones((5, 4))
    return (
        base.at[rows].add(h),
        base.at[jnp.arange(5)].multiply(h[:5], unique_indices=True),
        base.at[rows].max(h),
        base.at[0].set(h[0]),
    )


@program(lambda d: (d.normal(12), d.integers(4, 12)), tolerance="f32", low_dots=0)
def histogram_of_ones(x: Array, bins: Array) -> tuple[Array, Array]:
    """Counts in floats, past 256 each, and weights added to them."""
    counts = jnp.full(4, 255.0).at[bins].add(1.0)
    return counts, counts.at[bins].add(x)


@program(lambda d: (d.normal(4, 8), d.weight(8, 8), 2), low_dots=2)
def cache_update(x: Array, w: Array, position: int) -> Array:
    """A key-value cache: dynamic_update_slice, dynamic_slice, product."""
    cache = lax.dynamic_update_slice(jnp.zeros((8, 8)), x @ w, (position, 0))
    return lax.dynamic_slice(cache, (1, 0), (6, 8)) @ w


@program(lambda d: (d.normal(4, 8), d.weight(8, 8)), low_dots=1, tolerance="dot")
def top_k_gate(x: Array, w: Array) -> Array:
    """The two largest of each row, renormalised."""
    values, _ = lax.top_k(jax.nn.softmax(x @ w), 2)
    return values / values.sum(-1, keepdims=True)


@program(lambda d: (d.normal(6, 5), d.integers(9, 6)), tolerance="f32", low_dots=0)
def sorting(x: Array, keys: Array) -> tuple[Array, Array, Array, Array]:
    """sort, argsort, and rows in the order of a key."""
    rows = jnp.argsort(keys)
    return jnp.sort(x, axis=0), jnp.argsort(x[:, 0]), x[rows], jnp.searchsorted(jnp.sort(keys), 4)


@program(lambda d: (d.normal(6, 5), d.weight(5, 4), d.integers(6, 6)), low_dots=1)
def one_hot_dispatch(x: Array, w: Array, rows: Array) -> Array:
    """Positions by cumsum of a one-hot, and a gather by them."""
    h = x @ w
    order = (jnp.cumsum(jax.nn.one_hot(rows, 6), axis=0) * jax.nn.one_hot(rows, 6)).sum(1) - 1
    return h[order.astype(jnp.int32)] + order[:, None]


@program(lambda d: (d.normal(4, 6), d.weight(6, 6)), low_dots=2)
def shapes(x: Array, w: Array) -> Array:
    """Movement only: pad, roll, flip, tile, split, stack, repeat, transpose."""
    h = jnp.pad(x @ w, ((1, 1), (0, 0)), constant_values=1.0)
    a, b = jnp.split(jnp.roll(h, 1, axis=0), 2, axis=1)
    h = jnp.stack([a, jnp.flip(b, 0)], axis=1).reshape(6, 6)
    return jnp.repeat(jnp.tile(h, (1, 1)), 2, axis=0)[::2].T @ w
