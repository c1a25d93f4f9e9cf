"""What is stored where a program writes out what others have one operation for.

Gates and scales of channels; inner products; convolutions of a few taps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxamp import Precision, amp, plan_of
from jaxamp.plan import Decision
from tests.audit import products
from tests.programs.registry import Draw

POLICY = "auto_mixed_bf16"
BATCH, ROWS, WIDTH = 2, 16, 32
DRAW = Draw("written out")
X = DRAW.normal(BATCH, ROWS, WIDTH)
W = DRAW.normal(4, WIDTH, WIDTH, scale=WIDTH**-0.5)
GIVEN = DRAW.normal(BATCH, WIDTH)

Loss = Callable[[jax.Array], jax.Array]


def norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def gated(w: jax.Array) -> jax.Array:
    """A residual stream to which gated branches are added (Peebles and Xie 2023)."""
    x, gate = X @ w[0], (GIVEN @ w[1])[:, None]
    for _ in range(2):
        x = x + gate * (norm(x) @ w[2])
    return jnp.sum(jnp.tanh(norm(x) @ w[3]))


def convolved(w: jax.Array) -> jax.Array:
    """A causal convolution of four taps, cut into parts for three products."""
    padded = jnp.pad(X @ w[0], ((0, 0), (3, 0), (0, 0)))
    y = jax.nn.silu(sum(padded[:, i : i + ROWS] * w[1, i] for i in range(4)))
    q, k, v = jnp.split(y, [8, 16], -1)
    return jnp.sum(jnp.einsum("bih,bjh,bjd->bid", q, k, v) ** 2)


PROGRAMS: tuple[Loss, ...] = (gated, convolved)


def decisions(fn: Loss) -> Iterator[Decision]:
    return plan_of(fn, POLICY)(W).decisions()


@pytest.mark.product("program")
@pytest.mark.parametrize(
    "order", [lambda f: jax.grad(amp(f, POLICY)), lambda f: amp(jax.grad(f), POLICY)]
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_those_of_float32(program: Loss, order: Any) -> None:
    """And matrix products are narrow, whatever stands between them."""
    exact, found = jax.grad(program)(W), order(program)(W)
    assert jnp.linalg.norm(found - exact) < 0.02 * jnp.linalg.norm(exact)
    made = products(jax.make_jaxpr(order(program))(W).jaxpr)
    assert all(product.is_low or product.kept for product in made)


def test_an_inner_product_is_a_reduction() -> None:
    plan = plan_of(lambda x: jnp.einsum("bic,bic->bi", x, x @ W[0]), POLICY)(X)
    *_, made = [d for d in plan.decisions() if d.primitive == "dot_general"]
    assert made.output is made.operands[0] is Precision.F32, made.reason


def test_a_gated_branch_leaves_its_stream_narrow() -> None:
    """A norm subtracts from the stream what is nearly it; a gate does not make that worse."""
    sums = [d for d in decisions(gated) if d.primitive == "add"]
    stream = [d for d in sums if d.eqn.outvars[0].aval.shape == X.shape]
    assert stream[0].output is Precision.BF16, stream[0].reason
