"""Distances made of squares and products, whose cotangents nearly cancel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import amp
from tests.numerics.oracle import products_rounded
from tests.programs.registry import Draw

ROWS, WIDTH = 32, 8
DRAW = Draw("squared distances")
X = DRAW.normal(ROWS, WIDTH)
W = DRAW.weight(WIDTH, WIDTH)
LOW = {"auto_mixed_bf16": jnp.bfloat16, "auto_mixed": jnp.float16}


def squared_distances(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sum(a * a, -1)[:, None] + jnp.sum(b * b, -1) - 2 * a @ b.T


def nearness(w: jax.Array, x: jax.Array) -> jax.Array:
    a = x @ w
    return jnp.exp(-squared_distances(a, a) / WIDTH).mean()


@pytest.mark.parametrize("policy", LOW)
def test_what_comes_by_squares_and_by_products_is_not_rounded_apart(policy: str) -> None:
    def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(nearness)(w, x)

    def mixed(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(amp(nearness, policy))(w, x)

    rounded = products_rounded(gradient, LOW[policy])
    exact, oracle, found = (jax.jit(fn)(W, X) for fn in (gradient, rounded, mixed))
    assert 0 < np.linalg.norm(found - exact) <= 1.25 * np.linalg.norm(oracle - exact)
