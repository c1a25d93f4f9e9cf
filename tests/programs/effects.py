"""Mutable references and calls to the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import io_callback

from tests.programs.registry import Draw, program

LOG: list[tuple[str, float]] = []
"""What the host callbacks saw, in the order of the calls."""


def _dense(d: Draw) -> tuple:
    return d.normal(4, 8), d.weight(8, 8)


def _record(tag: str, value: np.ndarray) -> None:
    if np.asarray(value).dtype != np.float32:
        raise TypeError(f"the callback {tag} was written for float32, it got {value.dtype}")
    LOG.append((tag, float(np.sum(value))))


@program(_dense, low_dots=2, tags="effects")
def refs(x: Array, w: Array) -> tuple[Array, Array]:
    """A Ref made, read and added to inside the program."""
    total = jax.new_ref(jnp.zeros((4, 8)))
    total[...] = x @ w
    total[...] += jnp.tanh(total[...] @ w)
    total[0] = jnp.ones(8)
    return total[...], jax.freeze(total).sum()


@program(_dense, low_dots=1, tags="effects")
def refs_in_loop(x: Array, w: Array) -> Array:
    """A Ref that a loop's body adds into."""
    total = jax.new_ref(jnp.zeros((4, 8)))

    def body(i: Array, x: Array) -> Array:
        y = jnp.tanh(x @ w)
        total[...] += y
        return y

    lax.fori_loop(0, 3, body, x)
    return total[...]


@program(_dense, low_dots=2, tags="effects callback")
def io_callback_ordered(x: Array, w: Array) -> Array:
    """Two ordered calls around a product, on values that are not differentiated."""
    h = x @ w
    io_callback(lambda v: _record("first", v), None, lax.stop_gradient(h), ordered=True)
    y = jnp.tanh(h) @ w
    io_callback(lambda v: _record("second", v), None, lax.stop_gradient(y), ordered=True)
    return y


@program(_dense, low_dots=1, tags="effects callback")
def pure_callback(x: Array, w: Array) -> Array:
    """A host function with a derivative of its own."""
    shape = jax.ShapeDtypeStruct((4, 8), jnp.float32)

    def host(h: np.ndarray) -> np.ndarray:
        _record("pure", h)
        return np.tanh(h)

    @jax.custom_jvp
    def curve(h: Array) -> Array:
        return jax.pure_callback(host, shape, h, vmap_method="sequential")

    curve.defjvp(lambda p, t: (curve(*p), (1 - jnp.tanh(p[0]) ** 2) * t[0]))
    return curve(x @ w)


@program(_dense, low_dots=1, tags="effects callback")
def debug_callback(x: Array, w: Array) -> Array:
    """debug.callback and debug.print on a product, inside a scan."""

    def body(x: Array, i: Array) -> tuple[Array, None]:
        x = jnp.tanh(x @ w)
        jax.debug.callback(lambda v: _record("debug", v), x, ordered=True)
        jax.debug.print("{i} {m}", i=i, m=x.mean(), ordered=True)
        return x, None

    return lax.scan(body, x, jnp.arange(2))[0]
