"""Loops that move a state a little at a time, or until a tolerance."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from tests.numerics.hostile.registry import hostile


@hostile(lambda d: (d.normal(4, 8), d.weight(8, 8)))
def euler(y: Array, w: Array) -> Array:
    """1000 steps of y += 1e-3 f(y): each step is below half an ulp of y."""

    def step(y: Array, _: None) -> tuple[Array, None]:
        return y + 1e-3 * jnp.tanh(y @ w), None

    return lax.scan(step, y, None, length=1000)[0]


@hostile(lambda d: (d.normal(4, 8), d.weight(8, 8), d.weight(8, 8), d.weight(8, 2)))
def euler_between_products(x: Array, w: Array, u: Array, v: Array) -> Array:
    """The same from one network into another: the carry is an activation on all sides."""

    def step(y: Array, _: None) -> tuple[Array, None]:
        return y + 2e-3 * jnp.tanh(y @ w), None

    return lax.scan(step, x @ u, None, length=500)[0] @ v


@hostile(lambda d: (d.normal(4, 8), d.weight(8, 8), d.weight(8, 2)))
def clock_in_the_carry(x: Array, w: Array, v: Array) -> Array:
    """t += 1e-3, a thousand times, drives a network."""

    def step(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        t, y = carry
        return (t + 1e-3, y + 1e-3 * jnp.sin(6.0 * t) * jnp.tanh(x @ w)), None

    (t, y), _ = lax.scan(step, (jnp.float32(0), jnp.zeros((4, 8))), None, length=1000)
    return (y + t) @ v


@hostile(lambda d: (d.normal(1000, 2, 8), d.weight(8, 8), d.weight(8, 2)))
def moving_average(x: Array, w: Array, v: Array) -> Array:
    """0.999 m + 0.001 h over 1000 products: 0.999 is 1 in bf16."""

    def step(m: Array, rows: Array) -> tuple[Array, None]:
        return 0.999 * m + 0.001 * jnp.abs(rows @ w), None

    return lax.scan(step, jnp.zeros((2, 8)), x)[0] @ v


@hostile(lambda d: (d.normal(1000, 2, 8), d.weight(8, 8), d.weight(8, 2)))
def moving_average_corrected(x: Array, w: Array, v: Array) -> Array:
    """The same with Adam's correction 1 - 0.999 ** t and a rate of 1 - 0.999."""

    def step(carry: tuple[Array, Array], rows: Array) -> tuple[tuple[Array, Array], None]:
        m, t = carry
        return (m + (1 - 0.999) * (jnp.abs(rows @ w) - m), t + 1), None

    (m, t), _ = lax.scan(step, (jnp.zeros((2, 8)), jnp.int32(0)), x)
    return (m / (1 - 0.999 ** t.astype(jnp.float32))) @ v


@hostile(lambda d: (d.normal(4, 8), d.weight(8, 8), d.weight(8, 2)))
def root_by_descent(x: Array, w: Array, v: Array) -> Array:
    """y -= 0.02 (y² - a) until it moves by less than 1e-6: a low state stands still far off."""
    a = 1.0 + jnp.abs(x @ w)

    def going(carry: tuple[Array, Array]) -> Array:
        y, before = carry
        return jnp.max(jnp.abs(y - before)) > 1e-6

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        y, _ = carry
        return y - 0.02 * (y * y - a), y

    return lax.while_loop(going, step, (jnp.ones_like(a), jnp.zeros_like(a)))[0] @ v


@hostile(lambda d: (d.normal(4, 8), d.weight(8, 8), d.weight(8, 2)), keeps_products=True)
def fixed_point(x: Array, w: Array, v: Array) -> tuple[Array, Array]:
    """y = tanh(x + w y / 2) until 1e-6, then a product; and the number of steps."""

    def going(carry: tuple[Array, Array, Array]) -> Array:
        return (carry[1] > 1e-6) & (carry[2] < 200)

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        y, _, n = carry
        new = jnp.tanh(x + 0.5 * (y @ w))
        return new, jnp.max(jnp.abs(new - y)), n + 1

    y, _, n = lax.while_loop(going, step, (x, jnp.float32(1), jnp.int32(0)))
    return y @ v, n


@hostile(lambda d: (d.positive_definite(8), d.normal(8), d.weight(8, 2)), keeps_products=True)
def conjugate_gradients(a: Array, b: Array, v: Array) -> tuple[Array, Array]:
    """A solver with its own products and tolerance, then a product; and its number of steps."""

    def going(carry: tuple[Array, Array, Array, Array]) -> Array:
        _, r, _, n = carry
        return ((r @ r) > 1e-10) & (n < 50)

    def step(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        x, r, p, n = carry
        ap = a @ p
        size = r @ r
        alpha = size / (p @ ap)
        new = r - alpha * ap
        return x + alpha * p, new, new + (new @ new) / size * p, n + 1

    x, _, _, n = lax.while_loop(going, step, (jnp.zeros_like(b), b, b, jnp.int32(0)))
    return x @ v, n


@hostile(lambda d: (d.normal(8, 8), d.weight(8, 2)))
def leapfrog(q: Array, v: Array) -> Array:
    """2000 steps of a pendulum keep its energy only in float32."""

    def step(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        q, p = carry
        p = p - 5e-3 * jnp.sin(q)
        return (q + 5e-3 * p, p), None

    (q, p), _ = lax.scan(step, (q @ jnp.eye(8), jnp.zeros((8, 8))), None, length=2000)
    return jnp.concatenate([q, p], 0) @ v


@hostile(lambda d: (d.normal(32, 8), d.weight(8, 4), d.normal(32, 4), d.weight(4, 2)))
def inner_training_loop(x: Array, w: Array, y: Array, v: Array) -> Array:
    """300 steps at 1e-4 on weights that then make an activation."""

    def step(w: Array, _: None) -> tuple[Array, None]:
        g = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        return w - 1e-4 * g, None

    trained = lax.scan(step, w, None, length=300)[0]
    return 100.0 * (trained - w)


@hostile(lambda d: (d.normal(4, 8), d.normal(4, 8), d.weight(8, 2)))
def noise_schedule(x: Array, noise: Array, v: Array) -> Array:
    """sqrt of cumulative products of 1 - 1e-4 ... 1 - 0.02 mixes a sample with noise."""
    kept = jnp.cumprod(1.0 - jnp.linspace(1e-4, 0.02, 1000))[jnp.array([0, 3, 100, 999])][:, None]
    return (jnp.sqrt(kept) * x + jnp.sqrt(1.0 - kept) * noise) @ v


@hostile(lambda d: (d.normal(4, 8), d.normal(4, 8), d.weight(8, 8), d.weight(8, 2)))
def denoising_loop(x: Array, noise: Array, w: Array, v: Array) -> Array:
    """100 reverse steps, each a network and a small correction of the sample."""
    beta = jnp.linspace(1e-4, 0.02, 100)
    kept = jnp.cumprod(1.0 - beta)

    def step(y: Array, at: tuple[Array, Array]) -> tuple[Array, None]:
        b, a = at
        return (y - b / jnp.sqrt(1.0 - a) * jnp.tanh(y @ w)) / jnp.sqrt(1.0 - b), None

    return lax.scan(step, x, (beta, kept), reverse=True)[0] @ v


@hostile(lambda d: (d.normal(400, 2, 4), d.weight(4, 12), d.weight(4, 12), d.weight(4, 2)))
def memory_cell(x: Array, w: Array, u: Array, v: Array) -> Array:
    """A cell that forgets 0.001 and takes in 0.01 a step, over 400 steps."""

    def step(carry: tuple[Array, Array], row: Array) -> tuple[tuple[Array, Array], None]:
        c, h = carry
        i, f, o = jnp.split(row @ w + h @ u, 3, -1)
        c = jax.nn.sigmoid(f + 7.0) * c + 0.01 * jax.nn.sigmoid(i)
        return (c, jax.nn.sigmoid(o) * jnp.tanh(c)), None

    (_, h), _ = lax.scan(step, (jnp.zeros((2, 4)), jnp.zeros((2, 4))), x)
    return h @ v


@hostile(lambda d: (d.normal(6, 16), d.weight(16, 8), d.weight(8, 2)))
def power_iteration(x: Array, w: Array, v: Array) -> tuple[Array, Array]:
    """The leading direction of a matrix until it moves by less than 1e-6; and the steps."""
    a = (x @ w).T @ (x @ w)

    def going(carry: tuple[Array, Array, Array]) -> Array:
        return (carry[1] > 1e-6) & (carry[2] < 500)

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        u, _, n = carry
        new = (a[:, :, None] * u[None, :, None]).sum(1)[:, 0]
        new = new / jnp.sqrt((new * new).sum())
        return new, jnp.max(jnp.abs(new - u)), n + 1

    u, _, n = lax.while_loop(going, step, (jnp.ones(8), jnp.float32(1), jnp.int32(0)))
    return u @ v, n


@hostile(lambda d: (d.normal(4, 8), d.weight(8, 8), d.normal(96, 8, 8, scale=0.3), d.weight(8, 2)))
def residual_stream(x: Array, u: Array, w: Array, v: Array) -> Array:
    """96 residual layers by scan with small branches: a low stream must not drift."""

    def layer(h: Array, weight: Array) -> tuple[Array, None]:
        n = h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
        return h + 0.05 * jax.nn.silu(n @ weight), None

    return lax.scan(layer, x @ u, w)[0] @ v
