"""The search for the operation that made the first infinity or NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxamp
from jaxamp import training
from jaxamp.numerics.blame import INFINITY, NAN
from jaxamp.training import Nonfinite, StaticLossScale, explain_nonfinite
from tests.inspect.planted import FAULTS


def found(fun: Any, *args: Any) -> Nonfinite:
    """What is found, which is something."""
    result = explain_nonfinite(fun)(*args)
    assert result is not None
    return result


def test_finite_programs_have_nothing_to_explain():
    """No operation is blamed where all results are finite, whatever happens on the way."""
    assert explain_nonfinite(jnp.sin)(jnp.ones(3)) is None
    assert explain_nonfinite(lambda x: 1 / jnp.exp(x))(jnp.float32(1e3)) is None
    assert explain_nonfinite(lambda x: (x, "text", 3))(jnp.arange(3)) is None


@pytest.mark.parametrize("ask", [explain_nonfinite, training.debug_step])
def test_inside_of_a_transformation_there_are_no_numbers(ask):
    """It says so, and where to call it."""
    for transform in (jax.jit, jax.vmap):
        with pytest.raises(jaxamp.errors.InspectionError, match="there are none yet"):
            transform(lambda x: ask(jnp.log)(x))(jnp.ones(2))


def test_the_ceiling_of_a_scale_is_no_result():
    """What a function only hands on is not what it made."""
    assert explain_nonfinite(lambda x: (x, x[0] * 0 + 1))(jnp.array([1.0, jnp.inf])) is None


def test_float16_overflow_in_the_backward_pass():
    """A loss scale that is too large: the operation, its dtype, scope, line and pass are told."""

    def loss_fn(w, x):
        with jax.named_scope("head"):
            return jnp.sum(jnp.tanh(x @ w) @ w)

    step = training.scaled_value_and_grad(
        loss_fn, policy="auto_mixed", loss_scale=StaticLossScale(2.0**20)
    )
    result = found(jax.jit(step), jnp.full((4, 4), 0.1), jnp.ones((4, 4)))
    assert result.kind == INFINITY
    assert result.dtype == "float16"
    assert result.backward
    assert result.scope == "head"
    assert Path(__file__).name in result.source
    assert "loss_fn)" in result.source
    assert result.output == ".result[1]"
    text = str(result)
    assert "in float16 in head, at " in text
    assert "in the backward pass" in text


def test_the_infinity_behind_a_nan_is_blamed():
    """inf - inf is a NaN, but what overflowed came before it."""

    def fun(x):
        large = jnp.exp(x)
        return large - 2 * large

    result = found(fun, jnp.float32(1e3))
    assert (result.primitive, result.kind, result.largest) == ("exp", INFINITY, 1000.0)


def test_a_mask_of_infinities_is_not_blamed():
    """Where a constant is infinite on purpose, what made a NaN of it is told."""

    def fun(x):
        return jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf))

    result = found(fun, -jnp.ones(3))
    assert (result.primitive, result.kind) == ("sub", NAN)
    assert explain_nonfinite(fun)(jnp.array([1.0, -1.0])) is None


def test_a_barrier_hands_on_each_of_its_operands():
    """What recomputed operations read stands behind a barrier; the blame goes through it."""

    def fun(x):
        _, large = jax.lax.optimization_barrier((x + 1, jnp.exp(x)))
        return large * 2

    result = found(fun, jnp.float32(1e3))
    assert (result.primitive, result.largest) == ("exp", 1000.0)


def test_a_cast_is_part_of_its_operation():
    """What a cast for an operation, or of its result, makes infinite is the operation's."""
    name = "backward_overflow_in_layer_7_of_12"
    (planted,) = (fault for fault in FAULTS if fault.name == name)
    result = found(jaxamp.amp(planted.fn, "mixed_f16"), *planted.args)
    assert (result.primitive, result.dtype, result.largest) == ("mul", "float16", 1e6)
    fn, x = lambda x: jnp.exp(x) @ x, jnp.full((2, 2), 12.0)
    result = found(jaxamp.amp(fn, "mixed_f16"), x)
    assert (result.primitive, result.dtype) == ("dot_general", "float16")
    assert result == jaxamp.probe(fn, "mixed_f16")(x).first


def scanned(x):
    """Overflows in the sixth iteration."""
    return jax.lax.scan(lambda c, _: (c * c, c), x, length=8)[0]


def backwards(x):
    """Divides by zero at the last entry but one, the second iteration."""
    return jax.lax.scan(lambda c, y: (c, c / y), x, jnp.array([1.0, 0.0, 3.0]), reverse=True)[1]


def looped(x):
    """Overflows in the sixth iteration."""
    return jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, c[1] * c[1]), (0, x))[1]


def branched(x):
    """Divides by zero in the branch that is taken."""
    return jax.lax.cond(x > 0, lambda x: x / 0, lambda x: x, x)


@jax.custom_vjp
def _custom(x):
    return jnp.log(x * 0)


_custom.defvjp(lambda x: (_custom(x), x), lambda x, ct: (ct / x,))


@pytest.mark.parametrize(
    ("fun", "primitive", "iterations"),
    [
        (scanned, "mul", (5,)),
        (backwards, "div", (1,)),
        (looped, "mul", (5,)),
        (branched, "div", ()),
        (_custom, "log", ()),
        (jax.checkpoint(lambda x: jnp.log(x * 0)), "log", ()),
        (jax.jit(jax.jit(lambda x: jnp.log(x * 0))), "log", ()),
        (lambda x: jax.vmap(scanned)(x[None]), "mul", (5,)),
        (jax.grad(lambda x: jnp.sqrt(x * 0)), "div", ()),
        (lambda x: jax.lax.scan(lambda c, _: (scanned(c), None), x, length=2)[0], "mul", (0, 5)),
    ],
)
def test_inside_calls_loops_and_branches(fun, primitive, iterations):
    """The search enters what holds the operation, and tells which iteration it was."""
    result = found(fun, jnp.float32(10))
    assert (result.primitive, result.iterations) == (primitive, iterations)
    assert result.kind == INFINITY


def test_an_input_is_blamed_by_name():
    """Nothing in the program is at fault where a number was bad from the start."""
    params = {"w": jnp.array([1.0, jnp.nan])}
    result = found(lambda params, x: jnp.sum(params["w"] * x), params, jnp.ones(2))
    assert (result.primitive, result.kind, result.source) == ("input", NAN, "params['w']")
    assert "an input holds NaN: params['w']" in str(result)


def test_the_earliest_of_two_is_blamed():
    """A loss that is infinite is explained before the gradients that are NaN because of it."""
    result = found(training.scaled_value_and_grad(lambda w: jnp.log(w * 0)), jnp.float32(1))
    assert (result.output, result.primitive, result.backward) == (".result[0]", "log", False)
