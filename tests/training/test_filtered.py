"""Gradients of equinox modules under a policy and a loss scale."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxamp import training
from jaxamp.training import DynamicLossScale

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32))


@pytest.fixture(scope="module")
def model():
    """A small network with an activation, which is no array."""
    return eqx.nn.MLP(3, 2, 8, 2, activation=jax.nn.gelu, key=jax.random.key(0))


def loss_fn(model, x):
    """Mean square of the outputs."""
    return jnp.mean(jax.vmap(model)(x) ** 2)


@pytest.mark.parametrize(("policy", "rtol"), [("always_f32", 1e-6), ("auto_mixed", 5e-3)])
def test_agrees_with_equinox(model, policy, rtol):
    """Value, structure and gradients are those of equinox's own transform."""
    step = training.scaled_filter_value_and_grad(
        loss_fn, policy=policy, loss_scale=DynamicLossScale(256.0)
    )
    (loss, grads), finite, scale = eqx.filter_jit(step)(model, X)
    expected_loss, expected = eqx.filter_value_and_grad(loss_fn)(model, X)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    np.testing.assert_allclose(loss, expected_loss, rtol=rtol)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=rtol * np.abs(theirs).max())
    assert finite
    assert scale.counter == 1


def test_grad_with_aux(model):
    """Gradients beside aux, as equinox gives them."""
    step = training.scaled_filter_grad(lambda m, x: (loss_fn(m, x), x), has_aux=True)
    (grads, aux), finite, _ = step(model, X)
    assert grads.activation is None
    assert aux is not None
    assert finite


def test_integers_in_a_module_get_no_gradient(model):
    """Counters and masks stay out of the gradients; other arguments may be anything."""
    tree = {"model": model, "steps": jnp.int32(3)}
    grads = training.scaled_filter_grad(lambda t, x, mode: loss_fn(t["model"], x))(
        tree, X, "train"
    ).result
    assert grads["steps"] is None


def test_a_bad_leaf_of_a_module_is_named(model):
    """The name is the attribute path of the module."""
    broken = eqx.tree_at(lambda m: m.layers[2].bias, model, jnp.array([jnp.nan, 0.0]))
    step = training.scaled_filter_value_and_grad(loss_fn)
    (_, grads), finite, _ = step(broken, X)
    assert not finite
    assert training.first_nonfinite(grads) == ".layers[0].weight"
    found = training.explain_nonfinite(step)(broken, X)
    assert found is not None
    assert found.source == "model.layers[2].bias"


def test_bfloat16_modules_stay_bfloat16(model):
    """Updates in float32 go to optax, which keeps the dtypes that equinox's own would widen."""
    narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16) if eqx.is_array(w) else w, model)
    grads = training.scaled_filter_grad(loss_fn)(narrow, X).result
    updates = jax.tree.map(lambda g: -0.1 * g, grads)
    floats, rest = eqx.partition(narrow, eqx.is_inexact_array)
    moved = eqx.combine(optax.apply_updates(floats, updates), rest)
    assert {w.dtype for w in jax.tree.leaves(eqx.filter(moved, eqx.is_array))} == {
        jnp.dtype("bfloat16")
    }
    assert loss_fn(moved, X) < loss_fn(narrow, X)
