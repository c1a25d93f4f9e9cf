"""Curves near their bounds, whose derivatives are the distance to it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import amp
from tests.numerics.oracle import products_rounded
from tests.programs.registry import Draw

ROWS, WIDTH = 8, 16
DRAW = Draw("saturating curves")
X, Y = DRAW.normal(2, ROWS, WIDTH)
W, U, OUT = (DRAW.weight(WIDTH, WIDTH) for _ in range(3))


@jax.custom_jvp
def squared_distance(h: jax.Array) -> jax.Array:
    return jnp.tanh(h)


@squared_distance.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    y = squared_distance(*primals)
    return y, tangents[0] * (1 - y**2)


@pytest.mark.parametrize("policy", ["auto_mixed_bf16", "auto_mixed"])
@pytest.mark.parametrize("curve", [jnp.tanh, jax.nn.sigmoid, squared_distance])
def test_the_distance_to_a_bound_is_not_taken_of_a_rounding(
    curve: Callable[[jax.Array], jax.Array], policy: str
) -> None:
    """The sum of two products waits for the backward pass, and not the curve of it."""

    def gradient(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.mean((curve(x @ w + y @ U + 5) @ OUT - y) ** 2))(w)

    low = jnp.bfloat16 if policy == "auto_mixed_bf16" else jnp.float16
    exact = jax.jit(gradient)(W, X, Y)
    rounded = jax.jit(products_rounded(gradient, low))(W, X, Y)
    allowed = 4 * np.linalg.norm(rounded - exact)
    assert 0 < np.linalg.norm(jax.jit(amp(gradient, policy))(W, X, Y) - exact) <= allowed


Hidden = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def of_one(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.nn.softplus(x @ w + 20)


def of_a_sum(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.nn.softplus(x @ w + y @ U + 20)


def of_two(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.logaddexp(x @ w + 20, y @ U + 10)


@pytest.mark.parametrize("policy", ["auto_mixed_bf16", "auto_mixed"])
@pytest.mark.parametrize("hidden", [of_one, of_a_sum, of_two])
def test_the_mask_of_a_softplus_is_made_of_no_rounding(hidden: Hidden, policy: str) -> None:
    """The derivative of `softplus` is `exp(x - softplus(x))`, of which both are large."""

    def gradient(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.mean((hidden(w, x, y) @ OUT - y) ** 2))(w)

    low = jnp.bfloat16 if policy == "auto_mixed_bf16" else jnp.float16
    exact = jax.jit(gradient)(W, X, Y)
    rounded = jax.jit(products_rounded(gradient, low))(W, X, Y)
    allowed = 2 * np.linalg.norm(rounded - exact)
    assert 0 < np.linalg.norm(jax.jit(amp(gradient, policy))(W, X, Y) - exact) <= allowed
