"""Iterations with a test of convergence, and implicit derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.ode import odeint

from tests.programs.registry import Draw, program


def _system(d: Draw) -> tuple:
    return d.positive_definite(6), d.normal(6)


@program(_system, tolerance="deep")
def conjugate_gradient(a: Array, b: Array) -> Array:
    """`jax.scipy.sparse.linalg.cg`, a custom_linear_solve around a while."""
    return jax.scipy.sparse.linalg.cg(lambda x: a @ x, b, tol=1e-6, maxiter=20)[0]


@program(_system, tolerance="deep")
def custom_linear_solve(a: Array, b: Array) -> Array:
    """`lax.custom_linear_solve` with its own solver, forward and transposed."""

    def solve(matvec, b: Array) -> Array:
        x = jnp.zeros_like(b)
        return lax.fori_loop(0, 40, lambda _, x: x + 0.2 * (b - matvec(x)), x)

    return lax.custom_linear_solve(lambda x: a @ x, b, solve, solve)


@program(lambda d: (d.uniform(4, low=1.0, high=4.0),), tolerance="f32", low_dots=0)
def custom_root(a: Array) -> Array:
    """A cube root by Newton, differentiated by the implicit function theorem."""

    def f(x: Array) -> Array:
        return x * x * x - a

    def solve(f, x: Array) -> Array:
        return lax.fori_loop(0, 20, lambda _, x: x - f(x) / (3 * x * x), x)

    def tangent_solve(g, y: Array) -> Array:
        return y / g(jnp.ones_like(y))

    return lax.custom_root(f, jnp.full_like(a, 1.5), solve, tangent_solve)


@program(lambda d: (d.normal(5, 5, scale=0.2), d.normal(5)), tolerance="deep")
def fixed_point(w: Array, x: Array) -> Array:
    """A deep-equilibrium layer: z = tanh(w z + x), derivative by custom_vjp."""

    def iterate(f, z: Array) -> Array:
        def step(state):
            z, _, i = state
            return f(z), z, i + 1

        def going(state):
            z, previous, i = state
            return (jnp.abs(z - previous).max() > 1e-5) & (i < 100)

        return lax.while_loop(going, step, (f(z), z, 0))[0]

    @jax.custom_vjp
    def layer(w: Array, x: Array) -> Array:
        return iterate(lambda z: jnp.tanh(w @ z + x), jnp.zeros_like(x))

    def forward(w, x):
        z = layer(w, x)
        return z, (w, x, z)

    def backward(saved, ct):
        w, x, z = saved
        _, pull_z = jax.vjp(lambda z: jnp.tanh(w @ z + x), z)
        _, pull = jax.vjp(lambda w, x: jnp.tanh(w @ z + x), w, x)
        return pull(iterate(lambda u: ct + pull_z(u)[0], jnp.zeros_like(ct)))

    layer.defvjp(forward, backward)
    return layer(w, x)


@program(lambda d: (d.normal(3), d.normal(3, 3, scale=0.4)), tolerance="deep", low_dots=None)
def ode(y: Array, w: Array) -> Array:
    """An adaptive ODE solver with a small network as the field."""
    times = jnp.array([0.0, 0.5, 1.0])
    return odeint(lambda y, t: jnp.tanh(w @ y) - 0.1 * y, y, times, rtol=1e-4, atol=1e-5)


@program(_system, tolerance="deep", low_dots=1)
def power_iteration(a: Array, b: Array) -> Array:
    """The largest eigenvalue by repeated products."""

    def step(_, v: Array) -> Array:
        v = a @ v
        return v / jnp.linalg.norm(v)

    v = lax.fori_loop(0, 8, step, b)
    return jnp.sum(v * (a * v).sum(1))


@program(lambda d: (d.uniform(6, low=0.1, high=3.0),), tolerance="f32", low_dots=0)
def bisection(a: Array) -> Array:
    """Roots of x + log x = a between brackets that halve."""

    def step(_, bracket):
        low, high = bracket
        middle = 0.5 * (low + high)
        up = middle + jnp.log(middle) < a
        return jnp.where(up, middle, low), jnp.where(up, high, middle)

    start = (jnp.full_like(a, 1e-3), jnp.full_like(a, 10.0))
    return lax.fori_loop(0, 30, step, start)[0]
