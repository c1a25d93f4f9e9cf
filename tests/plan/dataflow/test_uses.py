"""What is kept narrow for a later product; nothing is where no product is narrow."""

import jax
import jax.numpy as jnp
import pytest

from jaxamp import amp
from tests.audit import equations
from tests.programs.registry import Draw

DRAW = Draw("uses")
TABLE, W = DRAW.normal(64, 32), DRAW.normal(32, 32, scale=32**-0.5)
ROWS = DRAW.integers(64, 256)


def rms(h: jax.Array) -> jax.Array:
    return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-5)


def embedded(table: jax.Array, w: jax.Array, rows: jax.Array) -> jax.Array:
    """A residual stream that begins with rows of a table."""
    h = table[rows]
    for _ in range(3):
        h += jnp.tanh(rms(h) @ w) @ w.T
    return jnp.mean(rms(h) ** 3)


@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
def test_where_no_product_is_narrow_nothing_is_rounded(order: str) -> None:
    """Products whose precision the program asks for stay float32."""
    with jax.default_matmul_precision("highest"):
        grad = jax.grad(amp(embedded)) if order == "grad(amp(f))" else amp(jax.grad(embedded))
        jaxpr = jax.make_jaxpr(grad)(TABLE, W, ROWS)
    dtypes = {v.aval.dtype for e in equations(jaxpr.jaxpr) for v in e.outvars}
    assert jnp.dtype(jnp.bfloat16) not in dtypes
