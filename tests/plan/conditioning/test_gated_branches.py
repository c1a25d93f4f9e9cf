"""Residual streams whose branches end in a gate, which a norm reads less their mean."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import Precision, amp, plan_of
from tests.numerics.oracle import products_rounded
from tests.programs.registry import Draw

ROWS, WIDTH = 64, 32
DRAW = Draw("gated branches")
(X,) = DRAW.normal(1, ROWS, WIDTH)
START, VALUE, GATE, OUT = (DRAW.weight(WIDTH, WIDTH) for _ in range(4))

Gate = Callable[[jax.Array], jax.Array]


def stream(gate: Gate) -> Callable[[jax.Array], jax.Array]:
    """Two layers as of a temporal fusion transformer (Lim et al. 2021)."""

    def layers(x: jax.Array) -> jax.Array:
        x = x @ START
        for _ in range(2):
            x = x + (x @ VALUE) * gate(x @ GATE)
            x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return x @ OUT

    return layers


@pytest.mark.parametrize(
    ("gate", "is_rounded"), [(jax.nn.sigmoid, True), (jnp.tanh, True), (lambda g: g, False)]
)
def test_a_gated_branch_is_rounded_as_any_other(gate: Gate, is_rounded: bool) -> None:
    """A bounded factor loses nothing that the other has not lost; two products may cancel."""
    decisions = plan_of(stream(gate), "auto_mixed_bf16")(X).decisions()
    kept = [d for d in decisions if d.reason == "a later operation amplifies its rounding"]
    assert (not kept) == is_rounded
    assert all(d.output is Precision.F32 for d in kept)


@pytest.mark.parametrize("policy", ["auto_mixed_bf16", "auto_mixed"])
@pytest.mark.parametrize("mean", [0, 30])
def test_a_gated_stream_is_as_accurate_as_rounded_products(mean: float, policy: str) -> None:
    """Of a stream far from zero the products' own rounding is as large."""
    low = jnp.bfloat16 if policy == "auto_mixed_bf16" else jnp.float16
    fn, x = stream(jax.nn.sigmoid), X + mean
    exact = jax.jit(fn)(x)
    allowed = 2 * np.linalg.norm(jax.jit(products_rounded(fn, low))(x) - exact)
    assert 0 < np.linalg.norm(jax.jit(amp(fn, policy))(x) - exact) <= allowed
