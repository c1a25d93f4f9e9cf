"""Higher-order primitives inside each other."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from tests.programs.effects import _record
from tests.programs.kernels import _square
from tests.programs.parallel import mesh
from tests.programs.registry import Draw, program


def _layers(d: Draw) -> tuple:
    return d.normal(4, 8), d.normal(3, 8, 8, scale=8**-0.5)


@jax.custom_vjp
def _dense(x: Array, w: Array) -> Array:
    return jnp.tanh(x @ w)


def _dense_forward(x: Array, w: Array):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


def _dense_backward(saved, ct: Array):
    x, w, y = saved
    dh = ct * (1 - y * y)
    return dh @ w.T, x.T @ dh


_dense.defvjp(_dense_forward, _dense_backward)


@jax.custom_jvp
def _scaled_relu(x: Array) -> Array:
    return jnp.maximum(x, 0.0) * 2.0


_kernel = jax.custom_jvp(_square)
_kernel.defjvp(lambda p, t: (_kernel(*p), 2.0 * p[0] * t[0]))
_scaled_relu.defjvp(lambda p, t: (_scaled_relu(*p), jnp.where(p[0] > 0, 2.0 * t[0], 0.0)))


@program(_layers, low_dots=1)
def scan_of_remat(x: Array, ws: Array) -> Array:
    """Scan over layers, each rematerialised: the way of large models."""
    layer = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w))
    return lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]


@program(_layers, low_dots=1)
def remat_of_scan_of_custom_vjp(x: Array, ws: Array) -> Array:
    """A rule inside a scan inside a checkpoint."""
    run = jax.checkpoint(lambda x: lax.scan(lambda x, w: (_dense(x, w), None), x, ws)[0])
    return run(x)


@program(_layers, low_dots=2)
def scan_of_cond_of_jit(x: Array, ws: Array) -> tuple[Array, Array]:
    """A layer that is skipped by a running value."""
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def body(x: Array, w: Array) -> tuple[Array, Array]:
        y = lax.cond(x.mean() > 5.0, lambda: x @ w, lambda: layer(x, w))
        return y, y[0]

    return lax.scan(body, x, ws)


@program(_layers, low_dots=2)
def cond_of_scan(x: Array, ws: Array) -> Array:
    """Loops as branches."""

    def run(sign: float, x: Array) -> Array:
        return lax.scan(lambda x, w: (x + sign * jnp.tanh(x @ w), None), x, ws)[0]

    return lax.cond(ws[0, 0, 0] > 9.0, functools.partial(run, 1.0), functools.partial(run, -1.0), x)


@program(_layers, low_dots=1)
def while_of_cond_of_scan(x: Array, ws: Array) -> Array:
    """Three levels, forward only by reverse mode's refusal."""

    def run(x: Array) -> Array:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    def step(state):
        i, x = state
        return i + 1, lax.cond(i % 2 == 0, run, lambda x: -x, x)

    return lax.while_loop(lambda s: s[0] < 3, step, (0, x))[1]


@program(_layers, low_dots=1)
def vmap_of_scan_of_custom_jvp(x: Array, ws: Array) -> Array:
    """Rows mapped over a loop with a rule in it."""

    def row(x: Array) -> Array:
        return lax.scan(lambda x, w: (_scaled_relu(x @ w), None), x, ws)[0]

    return jax.vmap(row)(x)


@program(_layers, low_dots=3)
def vmap_of_switch(x: Array, ws: Array) -> Array:
    """A mapped index turns branches into a select."""
    branches = [lambda x, w=w: jnp.tanh(x @ w) for w in ws]
    return jax.vmap(lambda i, x: lax.switch(i, branches, x))(jnp.arange(4) % 3, x)


@program(_layers, low_dots=1)
def jit_of_custom_jvp_of_jit(x: Array, ws: Array) -> Array:
    """A rule around a jitted function, jitted."""

    @jax.custom_jvp
    def f(x: Array, w: Array) -> Array:
        return jax.jit(jnp.matmul)(x, w)

    @f.defjvp
    def _(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return f(x, w), jax.jit(jnp.matmul)(dx, w) + x @ dw

    return jax.jit(f)(x, ws[0])


@program(_layers, low_dots=1)
def custom_vjp_of_scan(x: Array, ws: Array) -> Array:
    """A rule whose forward and backward are loops."""

    def run(x: Array, ws: Array) -> tuple[Array, Array]:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, ws)

    @jax.custom_vjp
    def f(x: Array, ws: Array) -> Array:
        return run(x, ws)[0]

    def backward(saved, ct):
        xs, ws, y = saved
        ys = jnp.concatenate([xs[1:], y[None]])

        def step(ct, layer):
            x, w, y = layer
            dh = ct * (1 - y * y)
            return dh @ w.T, x.T @ dh

        return lax.scan(step, ct, (xs, ws, ys), reverse=True)

    def forward(x, ws):
        y, xs = run(x, ws)
        return y, (xs, ws, y)

    f.defvjp(forward, backward)
    return f(x, ws)


@program(_layers, tags="compute")
def grad_inside_scan(x: Array, ws: Array) -> Array:
    """An inner gradient in each step: test-time training."""

    def inner(w: Array, x: Array) -> Array:
        return jnp.mean((jnp.tanh(x @ w) - x) ** 2)

    def body(w: Array, x: Array) -> tuple[Array, Array]:
        w = w - 0.1 * jax.grad(inner)(w, jnp.stack([x, x[::-1]]))  # of one row: an outer product
        return w, x @ w

    return lax.scan(body, ws[0], x)[1]


@program(_layers, low_dots=1, tags="devices")
def shard_map_of_scan_of_remat(x: Array, ws: Array) -> Array:
    """Data parallel layers."""

    @jax.checkpoint
    def layer(x: Array, w: Array) -> Array:
        return x + jnp.tanh(x @ w)

    def run(x: Array, ws: Array) -> Array:
        return lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]

    f = jax.shard_map(run, mesh=mesh(), in_specs=(P("d"), P()), out_specs=P("d"), check_vma=False)
    return f(x, ws)


@program(_layers, low_dots=1)
def map_of_remat(x: Array, ws: Array) -> Array:
    """A checkpoint in a map, with a policy."""
    policy = jax.checkpoint_policies.nothing_saveable
    f = jax.checkpoint(lambda w: jnp.sinh(x @ w), policy=policy)
    return lax.map(f, ws)


@program(_layers, low_dots=2, tags="effects callback")
def callback_in_cond_in_scan(x: Array, ws: Array) -> Array:
    """A host call in one branch."""

    def say(x: Array, w: Array) -> Array:
        y = jnp.tanh(x @ w)
        jax.debug.callback(lambda v: _record("branch", v), y)
        return y

    def body(x: Array, w: Array) -> tuple[Array, None]:
        return lax.cond(w[0, 0] > -9.0, say, lambda x, w: x @ w, x, w), None

    return lax.scan(body, x, ws)[0]


@program(_layers, low_dots=1)
def pallas_in_scan_in_jit(x: Array, ws: Array) -> Array:
    """A kernel in a loop in a jit."""
    run = jax.jit(lambda x: lax.scan(lambda x, w: (jnp.tanh(_kernel(x @ w)), None), x, ws)[0])
    return run(x)


@program(_layers, tolerance="deep")
def linear_solve_in_scan(x: Array, ws: Array) -> Array:
    """A linear solve in each step, after a product."""

    def body(x: Array, w: Array) -> tuple[Array, None]:
        a = w @ w.T + 2 * jnp.eye(8)
        return jnp.linalg.solve(a, x.T).T, None

    return lax.scan(body, x, ws)[0]


@program(_layers, low_dots=1)
def exported_in_scan(x: Array, ws: Array) -> Array:
    """An exported program in a loop."""
    exported = jax.export.export(jax.jit(jnp.tanh))(jax.ShapeDtypeStruct((4, 8), jnp.float32))
    return lax.scan(lambda x, w: (exported.call(x @ w), None), x, ws)[0]


@program(_layers, low_dots=1, tags="effects")
def refs_in_scan_in_jit(x: Array, ws: Array) -> Array:
    """A Ref of the outer function that a jitted loop writes."""
    total = jax.new_ref(jnp.zeros((4, 8)))

    @jax.jit
    def run(x: Array) -> Array:
        def body(x: Array, w: Array) -> tuple[Array, None]:
            y = jnp.tanh(x @ w)
            total[...] += y
            return y, None

        return lax.scan(body, x, ws)[0]

    return run(x) + total[...]
