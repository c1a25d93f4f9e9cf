"""Each control-flow primitive around products."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from tests.programs.registry import Draw, program


def _layers(d: Draw) -> tuple:
    return d.normal(4, 8), d.normal(3, 8, 8, scale=8**-0.5)


def _layer(x: Array, w: Array) -> Array:
    return x + jnp.tanh(x @ w)


@program(lambda d: (d.normal(4, 8), d.weight(8, 8)), low_dots=1)
def jit_nested(x: Array, w: Array) -> dict[str, Array]:
    """A jit inside a jit, with a static argument and a name."""

    @functools.partial(jax.jit, static_argnames="times")
    def outer(x: Array, times: int) -> Array:
        return times * jax.jit(_layer)(x, w)

    return {"y": outer(x, times=2)}


@program(_layers, low_dots=3)
def jit_shared(x: Array, ws: Array) -> Array:
    """One jitted layer called three times."""
    layer = jax.jit(_layer)
    for w in ws:
        x = layer(x, w)
    return x


@program(lambda d: (d.normal(4, 8), d.weight(8, 8), d.weight(8, 8), True), low_dots=2)
def cond(x: Array, w: Array, v: Array, pick: bool) -> Array:
    """Two branches with a product each."""
    return lax.cond(pick, lambda x: jnp.tanh(x @ w), lambda x: x @ v, x)


@program(lambda d: (d.normal(4, 8), d.weight(8, 8), 2), low_dots=1)
def switch(x: Array, w: Array, index: int) -> tuple[Array, Array]:
    """Three branches, one with a product, one returning its operand and a constant."""
    branches = [
        lambda x: (x, jnp.zeros(())),
        lambda x: (2 * x, x.mean()),
        lambda x: (x @ w, jnp.ones(())),
    ]
    return lax.switch(index, branches, x)


@program(_layers, low_dots=1)
def scan_layers(x: Array, ws: Array) -> Array:
    """The residual stream of scan over layers."""
    return lax.scan(lambda x, w: (_layer(x, w), None), x, ws)[0]


@program(_layers, low_dots=1)
def scan_outputs(x: Array, ws: Array) -> tuple[Array, Any, Array]:
    """Stacked outputs, an integer counter, reverse, unrolled."""

    def body(carry, w):
        x, n = carry
        y = _layer(x, w)
        return (y, n + 1), y.mean(0)

    (x, n), ys = lax.scan(body, (x, 0), ws, reverse=True, unroll=2)
    return x, n, ys


@program(lambda d: (d.uniform(4, low=1.0, high=9.0),), tolerance="f32", low_dots=0)
def while_newton(a: Array) -> Array:
    """Square roots by Newton: the test of convergence must see float32."""

    def going(state):
        x, previous = state
        return jnp.abs(x - previous).max() > 1e-5

    def step(state):
        x, _ = state
        return 0.5 * (x + a / x), x

    return lax.while_loop(going, step, (a, a + 1.0))[0]


@program(lambda d: (d.normal(4, 8), d.weight(8, 8)), low_dots=1)
def while_products(x: Array, w: Array) -> tuple[Any, Array]:
    """A while loop with a product in its body and a count in its test."""

    def step(state):
        i, x = state
        return i + 1, _layer(x, w)

    return lax.while_loop(lambda s: s[0] < 3, step, (0, x))


@program(lambda d: (d.normal(4, 8), d.weight(8, 8)), low_dots=1)
def fori_static(x: Array, w: Array) -> Array:
    """A fori_loop of known length."""
    return lax.fori_loop(0, 3, lambda i, x: _layer(x, w) * (1.0 + i), x)


@program(lambda d: (d.normal(4, 8), d.weight(8, 8), 3), low_dots=1)
def fori_dynamic(x: Array, w: Array, steps: int) -> Array:
    """A fori_loop whose length is an argument."""
    return lax.fori_loop(0, steps, lambda i, x: _layer(x, w), x)


@program(lambda d: (d.normal(5, 8), d.weight(8, 3)), low_dots=1)
def map_rows(xs: Array, w: Array) -> Array:
    """`lax.map` over rows."""
    return lax.map(lambda x: jnp.tanh(x @ w), xs)


@program(lambda d: (d.normal(6, 3, 3, scale=0.6),), tags="compute")
def associative_scan_products(ms: Array) -> Array:
    """Prefix products of matrices."""
    return lax.associative_scan(jnp.matmul, ms)


@program(_layers, low_dots=3)
def checkpoint_plain(x: Array, ws: Array) -> Array:
    """jax.checkpoint around each layer."""
    for w in ws:
        x = jax.checkpoint(_layer)(x, w)
    return x


@program(_layers, low_dots=2)
def checkpoint_dots(x: Array, ws: Array) -> Array:
    """A policy that saves the results of products."""

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def block(x: Array) -> Array:
        return jnp.sinh(jnp.tanh(x @ ws[0]) @ ws[1])

    return block(x)


@program(_layers, low_dots=2)
def checkpoint_names(x: Array, ws: Array) -> Array:
    """A policy that saves what has a name."""
    policy = jax.checkpoint_policies.save_only_these_names("hidden")

    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def block(x: Array) -> Array:
        hidden = checkpoint_name(jnp.tanh(x @ ws[0]), "hidden")
        return jnp.sinh(hidden @ ws[1])

    return block(x)


@program(lambda d: (d.normal(3, 4, 8), d.weight(8, 4)), low_dots=1)
def vmap_inside(xs: Array, w: Array) -> Array:
    """vmap in the program, with in_axes and a collective over its name."""

    def row(x: Array) -> Array:
        y = x @ w
        return y - lax.pmean(y, "rows")

    return jax.vmap(row, in_axes=0, axis_name="rows")(xs)


@program(lambda d: (d.normal(4, 8), d.weight(8, 4)), low_dots=1)
def reduce_by_function(x: Array, w: Array) -> Array:
    """`lax.reduce` with the user's own computation, on a product."""
    return lax.reduce(x @ w, 0.0, lambda a, b: a + b, (0,))


@program(lambda d: (d.normal(4, 8), d.weight(8, 4)), low_dots=1)
def barrier(x: Array, w: Array) -> Array:
    """optimization_barrier after a product."""
    h, w = lax.optimization_barrier((x @ w, w))
    return h * w.mean()


@program(lambda d: (d.normal(4, 8), d.weight(8, 4)), tags="compute")
def platform_dependent(x: Array, w: Array) -> Array:
    """A branch by platform."""
    return lax.platform_dependent(x, w, cpu=lambda x, w: x @ w, default=lambda x, w: 2 * (x @ w))
