"""Joins that are stored for later kernels, which read them as they are or moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import Precision, plan_of

X, W, BIAS = (np.ones(shape, np.float32) for shape in [(4, 16, 32), (2, 32, 32), (32,)])

Layer = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def whole(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ w[0].T + bias) @ w[1].T


def mapped(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    """A layer for one word, whose cotangents `vmap` transposes for the products with weights."""

    def word(x: jax.Array) -> jax.Array:
        return w[1] @ jax.nn.gelu(w[0] @ x + bias)

    return jax.vmap(jax.vmap(word))(x)


@pytest.mark.parametrize("layer", [whole, mapped])
def test_the_sum_of_a_cotangent_reads_what_products_read(layer: Layer) -> None:
    """Else the cotangent is stored twice, in float32 for its sum and rounded for the products."""

    def loss(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(layer(w, bias, jnp.tanh(x @ w[0]))))

    decisions = [*plan_of(jax.grad(loss, (0, 1)), "auto_mixed_bf16")(W, BIAS, X).decisions()]
    sums: Any = [d.eqn for d in decisions if d.primitive == "reduce_sum"]
    (of_rows,) = (e for e in sums if e.invars[0].aval.size > e.outvars[0].aval.size == BIAS.size)
    (made,) = (d for d in decisions if of_rows.invars[0] in d.eqn.outvars)
    assert made.output is Precision.BF16, made.reason
