"""What many products read: their cotangents are added up in float32, as those of a loop are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import amp
from tests.numerics.oracle import products_rounded
from tests.programs.registry import Draw

BATCH, WIDTH, READERS = 8, 16, 24
DRAW = Draw("many readers")
X = DRAW.normal(BATCH, WIDTH)
W = DRAW.normal(WIDTH, WIDTH, scale=WIDTH**-0.5)
SHARED = DRAW.normal(WIDTH, WIDTH, scale=WIDTH**-0.5)
OWN = DRAW.normal(READERS, WIDTH, WIDTH, scale=0.1 * WIDTH**-0.5)
# What all readers have in common adds up over the first half, and cancels over the second.
SIGNS = np.repeat([1.0, -1.0], READERS // 2)
LOW = {"auto_mixed_bf16": jnp.bfloat16, "auto_mixed": jnp.float16}


def heads(w: jax.Array, x: jax.Array) -> jax.Array:
    """Heads that read one hidden layer, each by itself."""
    h = jnp.tanh(x @ w)
    outs = (jnp.tanh(h @ jnp.asarray(SHARED + own)) @ SHARED for own in OWN)
    return sum(sign * (out**2).sum() for sign, out in zip(SIGNS, outs, strict=True))


def turned(w: jax.Array, x: jax.Array) -> jax.Array:
    """The same of a matrix that is transposed for each product."""
    h = x @ w
    outs = (jnp.tanh(jnp.asarray(SHARED + own) @ h.T).T @ SHARED for own in OWN)
    return sum(sign * (out**2).sum() for sign, out in zip(SIGNS, outs, strict=True))


ORDERS: dict[str, Callable[..., Any]] = {
    "grad(amp(f))": lambda fn, policy: jax.grad(amp(fn, policy)),
    "amp(grad(f))": lambda fn, policy: amp(jax.grad(fn), policy),
    "jitted": lambda fn, policy: jax.grad(amp(jax.jit(fn), policy)),
    "vmapped": lambda fn, policy: jax.grad(
        lambda w, x: jax.vmap(amp(fn, policy), (None, 0))(w, x[None]).sum()
    ),
}


@pytest.mark.product("order")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("loss", [heads, turned])
def test_cotangents_of_many_readers_lose_no_more_than_products_do(
    loss: Callable[..., jax.Array], policy: str, order: str
) -> None:
    exact = jax.grad(loss)(W, X)
    rounded = jax.jit(jax.grad(products_rounded(loss, LOW[policy])))(W, X)
    found = jax.jit(ORDERS[order](loss, policy))(W, X)
    assert jnp.linalg.norm(found - exact) < 2 * jnp.linalg.norm(rounded - exact)


@pytest.mark.feature("xla")
def test_what_many_read_is_saved_once() -> None:
    """Beside it the products whose `tanh` is computed again: its own, and one of each reader."""
    _, backward = jax.vjp(amp(heads), W, X)
    kept = [x for x in jax.tree.leaves(backward) if x.shape == (BATCH, WIDTH)]
    assert sum(x.dtype == jnp.bfloat16 for x in kept) == 1 + 1 + READERS
