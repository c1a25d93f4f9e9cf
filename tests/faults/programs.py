"""A program that goes through every stage: nested calls, a loop, a branch, custom derivatives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@jax.custom_vjp
def doubled(x: Array) -> Array:
    """Twice `x`."""
    return 2 * x


doubled.defvjp(lambda x: (2 * x, ()), lambda _, g: (2 * g,))


def loss(params: Any, x: Array) -> Array:
    """A scalar; weights (n, n), a bias (n,), inputs (batch, n)."""
    x = jax.jit(lambda x: jax.nn.gelu(x @ params["w"] + params["b"]))(x)
    x = jax.lax.scan(lambda c, _: (jnp.tanh(c @ params["w"]), None), x, None, length=2)[0]
    x = jax.lax.cond(x.sum() > 0, doubled, lambda x: x - 1, x)
    return jnp.mean(jax.nn.log_softmax(x @ params["w"]) ** 2)


def inputs(n: int = 8, batch: int = 4) -> tuple[Any, Array]:
    """Arguments of `loss`."""
    rng = np.random.default_rng(n)
    params = {
        "w": jnp.asarray(rng.normal(size=(n, n)) / np.sqrt(n), jnp.float32),
        "b": jnp.asarray(rng.normal(size=n), jnp.float32),
    }
    return params, jnp.asarray(rng.normal(size=(batch, n)), jnp.float32)


def same(got: Any, want: Any) -> None:
    """Two trees of arrays are bit for bit the same."""
    jax.tree.map(np.testing.assert_array_equal, got, want)
