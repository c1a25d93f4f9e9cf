"""Logarithms of probabilities that are stored, and of whose distances exponentials are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxamp import amp
from tests.numerics.oracle import products_rounded

TIME, WORDS, LABELS = 40, 10, 8


def ctc(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
    """optax's, which concatenates what follows its loop."""
    lengths, paddings = jnp.zeros(x.shape[:2]), jnp.zeros(labels.shape)
    return optax.ctc_loss(x @ w, lengths, labels, paddings).mean()


def arguments(seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 3)
    labels = jax.random.randint(keys[2], (2, LABELS), 1, WORDS)
    return (
        0.3 * jax.random.normal(keys[0], (16, WORDS)),
        jax.random.normal(keys[1], (2, TIME, 16)),
        labels,
    )


def error(fn: Callable[..., Any], seed: int) -> float:
    """Of the gradient, relative to float32's in norm."""
    want = jax.jit(jax.grad(ctc))(*arguments(seed))
    return float(jnp.linalg.norm(fn(*arguments(seed)) - want) / jnp.linalg.norm(want))


@pytest.mark.product
@pytest.mark.parametrize("order", ["grad_of_amp", "amp_of_grad"])
def test_ctc_loses_no_more_than_its_products(order: str) -> None:
    """Values of -80 in bfloat16 would be 0.25 off, and so would be exponents."""
    fn = jax.jit(jax.grad(amp(ctc))) if order == "grad_of_amp" else jax.jit(amp(jax.grad(ctc)))
    rounded = jax.jit(products_rounded(jax.grad(ctc), jnp.bfloat16))
    errors = [error(fn, seed) for seed in range(2)]
    bounds = [error(rounded, seed) for seed in range(2)]
    assert sum(errors) < 2 * sum(bounds)
