"""Recurrent networks: loops whose carry meets products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from tests.programs.registry import program


@program(lambda d: (d.normal(5, 2, 4), d.weight(4, 8), d.weight(8, 8), d.normal(8)), low_dots=2)
def rnn(xs: Array, w: Array, u: Array, b: Array) -> Array:
    """A tanh cell, weights closed over."""

    def cell(h: Array, x: Array) -> tuple[Array, Array]:
        h = jnp.tanh(x @ w + h @ u + b)
        return h, h

    return lax.scan(cell, jnp.zeros((2, 8)), xs)[1]


@program(
    lambda d: (d.normal(5, 2, 4), d.weight(4, 32), d.weight(8, 32), d.normal(32), d.integers(5, 2)),
    low_dots=2,
)
def lstm_with_lengths(xs: Array, w: Array, u: Array, b: Array, lengths: Array) -> Array:
    """An LSTM that stops at each sequence's length."""

    def cell(carry, step):
        h, c = carry
        t, x = step
        i, f, g, o = jnp.split(x @ w + h @ u + b, 4, axis=-1)
        c_new = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h_new = jax.nn.sigmoid(o) * jnp.tanh(c_new)
        live = (t <= lengths)[:, None]
        return (jnp.where(live, h_new, h), jnp.where(live, c_new, c)), None

    start = (jnp.zeros((2, 8)), jnp.zeros((2, 8)))
    return lax.scan(cell, start, (jnp.arange(5), xs))[0][0]


@program(lambda d: (d.normal(5, 2, 4), d.weight(4, 24), d.weight(8, 24)), low_dots=4)
def gru_two_ways(xs: Array, w: Array, u: Array) -> Array:
    """A GRU forward and in reverse."""

    def cell(h: Array, x: Array) -> tuple[Array, None]:
        xr, xz, xn = jnp.split(x @ w, 3, axis=-1)
        hr, hz, hn = jnp.split(h @ u, 3, axis=-1)
        z = jax.nn.sigmoid(xz + hz)
        n = jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)
        return (1 - z) * n + z * h, None

    ends = [lax.scan(cell, jnp.zeros((2, 8)), xs, reverse=r)[0] for r in (False, True)]
    return jnp.concatenate(ends, axis=-1)


@program(lambda d: (d.normal(16, 4), d.weight(4, 4)), low_dots=1)
def linear_recurrence(x: Array, w: Array) -> Array:
    """A diagonal state space by associative_scan over a projected input."""
    h = x @ w
    decay = jax.nn.sigmoid(h)

    def join(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    return lax.associative_scan(join, (decay, h))[1]


@program(lambda d: (d.normal(300, 4), d.weight(4, 4)), low_dots=1, tolerance="deep")
def running_mean(xs: Array, w: Array) -> tuple[Array, Array]:
    """An average, a clock and a count carried for 300 steps stay exact."""

    def step(carry, x):
        ema, clock, count = carry
        ema = 0.99 * ema + 0.01 * (x @ w)
        return (ema, clock + 1e-2, count + 1.0), None

    (ema, clock, count), _ = lax.scan(step, (jnp.zeros(4), 0.0, 0.0), xs)
    return ema, jnp.stack([clock, count])
