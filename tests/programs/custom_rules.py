"""Functions with their own derivative or batching rules."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

from tests.programs.registry import Draw, program


def _dense(d: Draw) -> tuple:
    return d.normal(4, 8), d.weight(8, 6)


@program(_dense, low_dots=1)
def custom_jvp(x: Array, w: Array) -> Array:
    """A rule with products inside."""

    @jax.custom_jvp
    def f(x: Array, w: Array) -> Array:
        return jnp.tanh(x @ w)

    @f.defjvp
    def _(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        y = jnp.tanh(x @ w)
        return y, (1 - y * y) * (dx @ w + x @ dw)

    return f(x, w)


@program(_dense, low_dots=2)
def custom_jvp_by_jvp(x: Array, w: Array) -> Array:
    """A rule that differentiates the function itself, with a mean in it."""

    @jax.custom_jvp
    def f(x: Array, w: Array) -> Array:
        return jnp.mean(jnp.tanh(x @ w) @ w.T)

    f.defjvp(lambda primals, tangents: jax.jvp(f.__wrapped__, primals, tangents))
    return f(x, w)


@program(_dense, low_dots=2)
def custom_jvp_zeros(x: Array, w: Array) -> Array:
    """Symbolic zero tangents, and a static argument."""

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def f(power: int, x: Array, w: Array) -> Array:
        return (x @ w) ** power

    def rule(power, primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        y = x @ w
        dy = jnp.zeros_like(y)
        if not isinstance(dx, jax.custom_derivatives.SymbolicZero):
            dy += dx @ w
        if not isinstance(dw, jax.custom_derivatives.SymbolicZero):
            dy += x @ dw
        return y**power, power * y ** (power - 1) * dy

    f.defjvp(rule, symbolic_zeros=True)
    return f(2, x, jax.lax.stop_gradient(w)) + f(3, x, w) * 0.1


@program(_dense, low_dots=1)
def custom_vjp(x: Array, w: Array) -> Array:
    """Forward and backward rules with products."""

    @jax.custom_vjp
    def f(x: Array, w: Array) -> Array:
        return jnp.sinh(x @ w)

    def forward(x: Array, w: Array):
        h = x @ w
        return jnp.sinh(h), (x, w, h)

    def backward(saved, ct: Array):
        x, w, h = saved
        dh = ct * jnp.cosh(h)
        return dh @ w.T, x.T @ dh

    f.defvjp(forward, backward)
    return f(x, w)


@program(lambda d: (*_dense(d), d.integers(4, 4)), low_dots=1)
def custom_vjp_nondiff(x: Array, w: Array, rows: Array) -> Array:
    """nondiff_argnums, an integer operand, and a gradient that is clipped."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def f(bound: float, x: Array, w: Array, rows: Array) -> Array:
        return x[rows] @ w

    def forward(bound, x, w, rows):
        return x[rows] @ w, (x, w, rows)

    def backward(bound, saved, ct):
        x, w, rows = saved
        ct = jnp.clip(ct, -bound, bound)
        return jnp.zeros_like(x).at[rows].add(ct @ w.T), x[rows].T @ ct, None

    f.defvjp(forward, backward)
    return f(0.5, x, w, rows)


@program(_dense, low_dots=1)
def custom_vjp_zeros(x: Array, w: Array) -> Array:
    """Symbolic zeros in the forward and the backward rule."""

    @jax.custom_vjp
    def f(x: Array, w: Array) -> tuple[Array, Array]:
        h = x @ w
        return h, jnp.tanh(h)

    def forward(x, w):
        h = x.value @ w.value
        return (h, jnp.tanh(h)), (x.value, w.value, h, w.perturbed)

    def backward(saved, cts):
        x, w, h, w_perturbed = saved
        dh = sum(
            (
                ct * scale
                for ct, scale in zip(cts, (1.0, 1 - jnp.tanh(h) ** 2), strict=True)
                if not isinstance(ct, jax.custom_derivatives.SymbolicZero)
            ),
            start=jnp.zeros_like(h),
        )
        return dh @ w.T, x.T @ dh if w_perturbed is not False else jnp.zeros_like(w)

    f.defvjp(forward, backward, symbolic_zeros=True)
    return f(x, w)[1]


@program(_dense, low_dots=1)
def custom_vjp_optimize_remat(x: Array, w: Array) -> Array:
    """A rule whose residuals JAX may recompute."""

    @jax.custom_vjp
    def f(x: Array, w: Array) -> Array:
        return jnp.tanh(x @ w)

    def forward(x, w):
        y = jnp.tanh(x @ w)
        return y, (x, w, y)

    def backward(saved, ct):
        x, w, y = saved
        dh = ct * (1 - y * y)
        return dh @ w.T, x.T @ dh

    f.defvjp(forward, backward, optimize_remat=True)
    return f(x, w)


@program(_dense, low_dots=1)
def custom_vjp_closure(x: Array, w: Array) -> Array:
    """A rule that closes over an array of its surroundings."""
    scale = jnp.abs(x).max()

    @jax.custom_vjp
    def straight_through(h: Array) -> Array:
        return jnp.round(h * 4) / 4

    straight_through.defvjp(lambda h: (straight_through(h), None), lambda _, ct: (ct,))
    return straight_through(jnp.tanh(x @ w)) * scale


@program(_dense, low_dots=1)
def custom_gradient(x: Array, w: Array) -> Any:
    """`jax.custom_gradient`: the rule is a closure."""

    @jax.custom_gradient
    def f(h: Array):
        return jnp.exp(-h * h), lambda ct: ct * -2 * h * jnp.exp(-h * h)

    return f(x @ w)


@program(_dense, low_dots=1)
def custom_batching(x: Array, w: Array) -> Array:
    """A function with its own vmap rule, called under vmap."""

    @custom_vmap
    def f(row: Array) -> Array:
        return jnp.tanh(row @ w)

    @f.def_vmap
    def _(size, batched, rows):
        return jnp.tanh(rows @ w), True

    return jax.vmap(f)(x)


@program(_dense, low_dots=2)
def custom_library_activations(x: Array, w: Array) -> Array:
    """relu, softplus, logsumexp and friends, some with rules of their own."""
    h = x @ w
    h = jax.nn.relu6(h) + jax.nn.softplus(h) + jax.nn.elu(h) + jax.nn.log_sigmoid(h)
    return jax.nn.logsumexp(h @ w.T, axis=-1)


@program(_dense)
def linear_call(x: Array, w: Array) -> Array:
    """A linear function given with its transpose."""

    def forward(w: Array, x: Array) -> Array:
        return x @ w

    def transpose(w: Array, ct: Array) -> Array:
        return ct @ w.T

    fixed = jax.lax.stop_gradient(w)
    return jnp.tanh(jax.custom_derivatives.linear_call(forward, transpose, fixed, x))


@program(_dense, low_dots=1)
def custom_vjp_static_residual(x: Array, w: Array) -> Array:
    """The forward rule saves a Python bool that the backward rule branches on."""

    @jax.custom_vjp
    def f(x: Array, w: Array) -> Array:
        return x @ w

    def backward(saved: Any, ct: Array) -> Any:
        x, w, scaled = saved
        dx = ct @ w.T
        return (0.5 * dx if scaled else dx), x.T @ ct

    f.defvjp(lambda x, w: (x @ w, (x, w, True)), backward)
    return f(x, w)
