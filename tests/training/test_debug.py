"""``debug_step``: the operation to blame, and rules that were verified."""

from __future__ import annotations

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxamp
from jaxamp import amp, training
from jaxamp.training import StaticLossScale, debug_step
from tests.inspect.planted import FAULTS, MARK, Fault

X, W = jnp.ones((4, 4)), jnp.full((4, 4), 0.1)


def test_rules_prevent_what_they_are_for():
    """A loss scale that is too large: with the rules that are named the step is finite."""

    def loss_fn(w, x):
        with jax.named_scope("head"):
            return jnp.sum(jnp.tanh(x @ w) @ w)

    scale = StaticLossScale(2.0**20)
    step = training.scaled_value_and_grad(loss_fn, policy="auto_mixed", loss_scale=scale)
    found = debug_step(jax.jit(step))(W, X)
    assert found.first is not None
    assert (found.first.dtype, found.first.scope, found.first.backward) == ("float16", "head", True)
    assert found.finite_in_f32
    assert found.finite_unscaled
    text = str(found)
    assert "The loss scale is too large: under a scale of 1 the step is finite." in text
    assert "prevents it too: policy.with_rules(Rule(precision='f32', scope='head'" in text
    assert json.loads(found.to_json())["rules"] == [rule.to_data() for rule in found.rules]
    policy = jaxamp.PrecisionPolicy.AUTO_MIXED.with_rules(*found.rules)
    mended = training.scaled_value_and_grad(loss_fn, policy=policy, loss_scale=scale)
    assert mended(W, X).grads_finite
    assert not step(W, X).grads_finite


@pytest.mark.long
def test_a_scale_in_an_optimizer_is_to_blame_too():
    """The scale is asked wherever it is applied, and only for what the backward pass did."""

    def loss_fn(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    optimizer = training.with_loss_scale(optax.sgd(0.1), training.DynamicLossScale(2.0**20))

    def step(w, state, x):
        def scaled(w):
            return state.loss_scale.scale(amp(loss_fn, "auto_mixed")(w, x))

        updates, _ = optimizer.update(jax.grad(scaled)(w), state, w)
        return updates, jax.grad(scaled)(w)

    assert debug_step(step)(W, optimizer.init(W), X).finite_unscaled
    unscaled = debug_step(training.scaled_value_and_grad(loss_fn, policy="auto_mixed"))(1e6 * W, X)
    assert unscaled.finite_unscaled is None
    assert "loss scale" not in str(unscaled)


def test_a_backward_pass_may_overflow_without_a_scale():
    """Then the scale is not blamed."""
    step = training.scaled_grad(
        lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w * 1e6), policy="auto_mixed"
    )
    found = debug_step(step)(W, X)
    assert found.finite_unscaled is False
    assert "loss scale" not in str(found)


def test_a_rule_that_a_wider_one_covers_is_left_out():
    """The product inside fails first, then one around it: the rule for that holds for both."""

    def net(w, x):
        with jax.named_scope("outer"):
            with jax.named_scope("inner"):
                x = x @ w @ w
            return x @ w

    found = debug_step(amp(net, "mixed_f16"))(1e4 * W, X)
    assert [rule.scope for rule in found.rules] == ["outer"]


def test_a_trial_warns_of_nothing():
    """A policy that is tried on the way is not the user's: no warning says what it leaves idle."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", jaxamp.errors.IdlePolicyWarning)
        found = debug_step(amp(lambda w, x: x @ w @ w @ w, "mixed_f16"))(1e4 * W, X)
    assert found.rules


def test_a_fault_of_the_program_has_no_rule():
    """What float32 does not survive either is said to be no matter of precision."""
    step = jaxamp.amp(lambda x: jnp.log(x @ x * 0), "auto_mixed")
    found = debug_step(step)(X)
    assert found.first is not None
    assert found.first.primitive == "log"
    assert not found.rules
    assert "float32 either" in str(found)


def test_a_finite_step_has_no_fault():
    """Nothing is blamed where nothing is wrong."""
    assert str(debug_step(jaxamp.amp(lambda x: x @ x))(X)) == "The step is finite."


@pytest.mark.product("name", every=2)
@pytest.mark.parametrize("name", ["large_weight", "taken_branch", "custom_vjp_backward_overflow"])
def test_rules_hold_when_the_step_runs(name: str):
    """What was verified is what happens: the step with the rules is finite."""
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    assert mended(fault) == ""


def mended(fault: Fault) -> str:
    """What is wrong with the answer to a planted fault; empty if nothing is."""
    found = debug_step(amp(fault.fn, fault.policy))(*fault.args)
    if found.first is None or not found.first.place.text.endswith(MARK):
        return f"blamed {found.first}"
    low = found.first.dtype in ("float16", "bfloat16")
    if not found.finite_in_f32:
        return "" if not found.rules else f"{found.rules}, where float32 is not finite either"
    if not (low and found.rules):
        return f"no rules for {found.first}"
    policy = jaxamp.PrecisionPolicy.parse(fault.policy).with_rules(*found.rules)
    results = jax.tree.leaves(amp(fault.fn, policy)(*fault.args))
    return "" if all(np.isfinite(r).all() for r in results) else f"{found.rules} do not prevent it"


@pytest.mark.parametrize("grad", [pytest.param(False, marks=pytest.mark.long), True])
def test_an_argument_beyond_float16_is_named(grad):
    """Counts of 17 bits: debug_step, probe and report say which argument it is, and the cure."""

    def loss_fn(w, batch):
        return jnp.mean(jnp.tanh((batch["image"] - 1e5) @ w)) + jnp.mean(batch["image"] @ w)

    batch, cure = {"image": jnp.full((8, 4), 1.2e5), "noise": X}, "or take mixed_bf16"
    named = "The argument batch['image'] holds numbers up to 1.2e+05"
    fn = jax.grad(loss_fn) if grad else loss_fn
    for policy, is_named in (("mixed_f16", True), ("mixed_bf16", False)):
        texts = [str(debug_step(amp(fn, policy))(W, batch))]
        texts += [str(jaxamp.probe(fn, policy)(W, batch).first)]
        texts += [str(jaxamp.report(fn, policy)(W, batch))]
        for text in texts:
            words = " ".join(text.split())
            assert (named in words and cure in words) is is_named, text
    small = {"image": jnp.ones((8, 4)), "noise": X}
    assert "float16 end" not in str(jaxamp.report(fn, "mixed_f16")(W, small))
    shapes = jax.eval_shape(lambda: (W, batch))
    assert "float16 end" not in str(jaxamp.report(fn, "mixed_f16")(*shapes))


def test_an_argument_whose_infinities_a_curve_hides_is_named():
    """The step is finite, and wrong: all three say so."""

    def loss_fn(w, counts):
        return jnp.mean(jnp.tanh(counts @ w) ** 2)

    args = 1e-6 * W, jnp.full((8, 4), 7e4)
    named = "The argument counts holds numbers up to 7e+04"
    diagnosis = debug_step(amp(loss_fn, "mixed_f16"))(*args)
    others = [look(loss_fn, "mixed_f16")(*args) for look in (jaxamp.probe, jaxamp.report)]
    assert all(named in " ".join(str(found).split()) for found in (diagnosis, *others))
    assert named in json.loads(diagnosis.to_json())["too_large"][0]
    assert str(debug_step(amp(loss_fn, "bf16"))(*args)) == "The step is finite."
