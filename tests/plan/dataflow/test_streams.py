"""Rows of a table that a residual stream begins with: they may be data as well as embeddings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxamp import amp
from tests.programs.registry import Draw

ROWS, WORDS, WIDTH = 600, 64, 8
DRAW = Draw("streams of rows")
TABLE = DRAW.uniform(ROWS, WIDTH, low=90.0, high=100.0)
W = DRAW.weight(WIDTH, 32), DRAW.weight(32, WIDTH)
WORD = DRAW.integers(ROWS, WORDS)


def phases(w: tuple[jax.Array, jax.Array], table: jax.Array) -> jax.Array:
    x = table[WORD]
    x = x + jnp.tanh(jnp.sin(x) @ w[0]) @ w[1]
    return jnp.mean((x @ w[0]) ** 2)


@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
def test_rows_that_begin_a_stream_are_not_rounded(order: str) -> None:
    """Stored narrow, as the sum that follows is, they turn these phases by up to 0.25."""
    grad = (
        jax.grad(amp(phases, "bf16")) if order == "grad(amp(f))" else amp(jax.grad(phases), "bf16")
    )
    for found, exact in zip(grad(W, TABLE), jax.grad(phases)(W, TABLE), strict=True):
        assert jnp.abs(found - exact).max() < 0.02 * jnp.abs(exact).max()
