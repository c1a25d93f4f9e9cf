"""Fields of a decision, as a reader finds them in a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxamp import Precision, plan_of
from jaxamp.plan import Decision

BF16 = Precision.BF16
W, X = jnp.ones((16, 16)), jnp.ones((8, 16))


def decision(fn: Callable[..., Any], primitive: str, *args: Any) -> Decision:
    """Return the only decision about a primitive."""
    (found,) = [d for d in plan_of(fn)(*args).decisions() if d.primitive == primitive]
    return found


def test_a_product_is_differentiated_with_respect_to_boundary_values() -> None:
    """The first operand is an argument, the second an activation."""

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return w @ jnp.tanh(x @ w).T

    first, second = (d for d in plan_of(fn)(W, X).decisions() if d.primitive == "dot_general")
    assert first.plan.originals == (0, 1)
    assert second.plan.originals == (0,)
    assert first.operands == second.operands == (BF16, BF16)


def test_a_composite_is_planned_inside_and_keeps_its_signature() -> None:
    """A compiler may replace the whole, so that its operands and results stay as they are."""

    @functools.partial(jax.lax.composite, name="test.dense")
    def dense(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    found = [*plan_of(lambda x, w: dense(x, w) @ w)(X, W).decisions()]
    around, inside, _, after = (d for d in found if d.primitive != "convert_element_type")
    assert around.primitive == "composite"
    assert {*around.operands, *around.outputs} <= {None, Precision.F32}
    assert inside.operands == after.operands == (BF16, BF16)


def test_a_loop_gets_casts_of_its_weights() -> None:
    """Operand 0 of the scan is the weight, and so is input 0 of its body."""

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0]

    scan = decision(fn, "scan", W, X)
    assert scan.plan.invariant_forms == scan.plan.inner[0].invariant_forms == ((0, BF16),)


def test_a_while_loop_counts_the_invariants_of_its_test() -> None:
    """The limit is operand 0, the weight operand 1 and input 0 of the body."""

    def fn(w: jax.Array, x: jax.Array, limit: jax.Array) -> jax.Array:
        def test(carry: Any) -> jax.Array:
            return carry[0] < limit

        return jax.lax.while_loop(test, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]

    loop = decision(fn, "while", W, X, jnp.asarray(3))
    assert loop.plan.invariant_forms == ((1, BF16),)
    assert loop.plan.inner[-1].invariant_forms == ((0, BF16),)


def test_a_loop_gets_narrow_invariants_wide() -> None:
    """An activation that each iteration reads narrow has its cotangents summed in f32."""

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        memory = x @ w

        def body(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh((h @ memory.T) @ memory), None

        return jax.lax.scan(body, x, None, length=3)[0]

    scan = decision(fn, "scan", W, X)
    assert scan.operands[0] is BF16
    assert scan.plan.invariant_forms == scan.plan.inner[0].invariant_forms == ((0, Precision.F32),)


@pytest.mark.feature("xla")
def test_a_movement_of_weights_rounds_what_it_moves() -> None:
    """Reversed weights of a convolution are rounded before they are reversed."""

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, jnp.flip(w, (0, 1)), (1, 1), "SAME", dimension_numbers=dims
        )

    moved = decision(fn, "rev", jnp.ones((3, 3, 4, 4)), jnp.ones((1, 8, 8, 4)))
    assert moved.plan.hints.moved_rounding is BF16
    assert moved.output is Precision.F32
