"""Exponentials of logistics are bfloat16, where only quantized products read what follows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import PrecisionPolicy, Rule, amp, plan_of
from tests.quantized.lowp.models import mlp_inputs, mlp_loss, policy

CURRENT = policy("fp8_current")
FINE = CURRENT.with_rules(Rule(precision="f32", primitive="logistic"))


def coarse(fn, chosen, *args):
    """How many logistics have their exponential in bfloat16."""
    decisions = plan_of(fn, chosen)(*args).decisions()
    found = [d.reason for d in decisions if d.primitive == "logistic"]
    assert found
    return sum("exponential in bf16" in reason for reason in found)


@pytest.mark.parametrize("fn", [mlp_loss, jax.grad(mlp_loss)], ids=["forward", "both passes"])
def test_the_gate_of_a_quantized_mlp(fn):
    """In both passes products of 8 bits read it; in bf16 it is as it was."""
    args = mlp_inputs(tokens=32, width=32, hidden=64)
    assert coarse(fn, CURRENT, *args) == 1
    assert coarse(fn, PrecisionPolicy.MIXED_BF16, *args) == 0


def test_what_others_read_is_exact():
    """A sum of the gates, as an auxiliary loss has it, is not rounded to 8 bits."""

    def both(params, x, target):
        gates = jax.nn.sigmoid(x @ params["gate"])
        return mlp_loss(params, x, target) + jnp.sum(gates @ params["down"]) + jnp.sum(gates)

    assert coarse(both, CURRENT, *mlp_inputs(tokens=32, width=32, hidden=64)) == 1


def test_an_argument_of_float32_is_left_alone():
    """Its rounding would be multiplied by the argument."""

    def warm(params, x, target):
        return mlp_loss(params, x, target) + jnp.sum(
            jax.nn.sigmoid(1.5 * (x @ params["gate"])) @ params["down"]
        )

    assert coarse(warm, CURRENT, *mlp_inputs(tokens=32, width=32, hidden=64)) == 1


def exact_gradients(args):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(jnp.float64), args)
        return jax.tree.map(np.asarray, jax.grad(mlp_loss)(*wide))


@pytest.mark.parametrize("order", ["grad(amp)", "amp(grad)"])
def test_gradients_are_as_exact_as_their_operands(order):
    """Against float64, no worse than with float32's exponential, which a rule asks for."""
    args = mlp_inputs()
    exact = exact_gradients(args)

    def error(chosen):
        grad = (
            jax.grad(amp(mlp_loss, chosen))
            if order == "grad(amp)"
            else amp(jax.grad(mlp_loss), chosen)
        )
        got = jax.jit(grad)(*args)
        off = jax.tree.map(
            lambda g, e: np.linalg.norm(np.asarray(g) - e) / np.linalg.norm(e), got, exact
        )
        return np.array([off[name] for name in sorted(off)])

    assert coarse(mlp_loss, FINE, *args) == 0
    np.testing.assert_allclose(error(CURRENT), error(FINE), rtol=0.02)


def test_far_arguments_give_numbers():
    """An exponential that overflows is a logistic of zero, whose derivative is zero."""
    params, x, target = mlp_inputs(tokens=32, width=32, hidden=64)
    far = {**params, "gate": 1e4 * params["gate"]}
    for grad in (jax.grad(amp(mlp_loss, CURRENT)), amp(jax.grad(mlp_loss), CURRENT)):
        assert all(map(np.all, map(np.isfinite, jax.tree.leaves(jax.jit(grad)(far, x, target)))))
