"""equinox: amp of a module is a module, and modules are arguments like any others."""

from __future__ import annotations

import gc
import io
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import PrecisionPolicy, amp, plan_of
from jaxamp.errors import NotCallableError

LOW = {"rtol": 3e-2, "atol": 3e-2}
KEY = jax.random.key(0)


def _mlp() -> eqx.nn.MLP:
    return eqx.nn.MLP(4, 2, 8, 2, key=KEY)


def _x(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape or (4,))


class Net(eqx.Module):
    """A module with every kind of field."""

    layers: list
    activation: object
    heads: int
    rate: float
    name: str = eqx.field(static=True)

    def __init__(self):
        self.layers = [eqx.nn.Linear(4, 4, key=KEY), eqx.nn.Linear(4, 4, key=KEY)]
        self.activation = jnp.tanh
        self.heads, self.rate, self.name = 2, 0.5, "net"

    def __call__(self, x):
        x = self.encode(x)
        if self.rate > 0 and self.name == "net":
            x = x * self.rate
        return x.reshape(self.heads, -1)

    def encode(self, x):
        for layer in self.layers:
            x = self.activation(layer(x))
        return x

    @eqx.filter_jit
    def jitted(self, x):
        return self.encode(x)

    @property
    def depth(self):
        return len(self.layers)


def _is_low(fn, *args) -> bool:
    return "bf16" in str(jax.make_jaxpr(fn)(*args))


def test_is_a_module_with_the_same_leaves():
    """It is a Module, its leaves are the very same objects, in the same order."""
    model = Net()
    amped = amp(model)
    assert isinstance(amped, eqx.Module)
    pairs = zip(jax.tree.leaves(amped), jax.tree.leaves(model), strict=True)
    assert all(a is b for a, b in pairs)
    again = jax.tree.unflatten(*reversed(jax.tree.flatten(amped)))
    np.testing.assert_array_equal(again(_x()), amped(_x()))


def test_attributes_are_reached():
    """Fields, static fields, properties and submodules are those of the module."""
    model = Net()
    amped = amp(model, "auto_mixed")
    assert amped.layers[0].weight is model.layers[0].weight
    assert (amped.heads, amped.rate, amped.name, amped.depth) == (2, 0.5, "net", 2)
    assert amped.activation is jnp.tanh
    assert amped.amp_settings.policy is PrecisionPolicy.AUTO_MIXED
    with pytest.raises(AttributeError, match="nothing"):
        _ = amped.nothing


def test_computes_low():
    """A call, and a call of any of its methods, computes in the policy's precision."""
    model = Net()
    amped = amp(model)
    np.testing.assert_allclose(amped(_x()), model(_x()), **LOW)
    for call in (amped, amped.encode, amped.jitted, amp(model.encode), amp(model)):
        assert _is_low(call, _x())
        assert call(_x()).dtype == jnp.float32
    for call in (model, amp(model, "always_f32"), amp(model, "always_f32").encode):
        assert not _is_low(call, _x())


def test_traces_once():
    """New values of the arrays, and a new amp of the same module, trace nothing."""

    class Counting(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            nonlocal traces
            traces += 1
            return x @ self.w

    traces = 0
    for scale in (1.0, 2.0, 3.0):
        model = Counting(jnp.eye(4) * scale)
        np.testing.assert_allclose(amp(model)(_x()), model(_x()), **LOW)
    assert traces == 4  # one under amp, three here


def test_filter_transforms():
    """filter_jit, filter_grad, filter_vmap, filter_value_and_grad take it as a module."""
    model, amped = _mlp(), amp(_mlp())
    np.testing.assert_allclose(eqx.filter_jit(amped)(_x()), model(_x()), **LOW)
    np.testing.assert_allclose(eqx.filter_jit(lambda m, x: m(x))(amped, _x()), model(_x()), **LOW)
    assert eqx.filter_vmap(amped)(_x(3, 4)).shape == (3, 2)

    def loss(m, x):
        return jnp.sum(m(x) ** 2)

    expected = eqx.filter_grad(loss)(model, _x())
    value, grads = eqx.filter_value_and_grad(loss)(amped, _x())
    assert value.dtype == jnp.float32
    assert jax.tree.structure(grads.amp_module) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, rtol=0.1, atol=0.05)


def test_updates_of_the_tree():
    """tree_at, apply_updates, partition and combine give amped modules."""
    amped = amp(_mlp())
    zeros = eqx.tree_at(lambda m: m.layers[0].weight, amped, jnp.zeros((8, 4)))
    assert type(zeros) is type(amped)
    assert not zeros.layers[0].weight.any()
    arrays, rest = eqx.partition(amped, eqx.is_array)
    np.testing.assert_array_equal(eqx.combine(arrays, rest)(_x()), amped(_x()))
    doubled = eqx.apply_updates(amped, arrays)
    np.testing.assert_array_equal(doubled.layers[0].weight, 2 * amped.layers[0].weight)


def test_serialisation():
    """Leaves saved from the module are read into the amped one, and the other way round."""
    model, amped = _mlp(), amp(eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(7)))
    for source, like in ((model, amped), (amped, model)):
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, source)
        file.seek(0)
        loaded = eqx.tree_deserialise_leaves(file, like)
        assert type(loaded) is type(like)
        np.testing.assert_array_equal(loaded.layers[0].weight, source.layers[0].weight)


def test_inference_mode_and_dropout():
    """Switches inside the module are set from outside, and keys reach it."""
    model = eqx.nn.Sequential([eqx.nn.Linear(4, 4, key=KEY), eqx.nn.Dropout(0.5)])
    amped = amp(model)
    np.testing.assert_allclose(amped(_x(), key=KEY), model(_x(), key=KEY), **LOW)
    still = eqx.nn.inference_mode(amped)
    np.testing.assert_allclose(still(_x()), eqx.nn.inference_mode(model)(_x()), **LOW)
    only = amp(eqx.nn.Dropout(0.5))
    np.testing.assert_array_equal(eqx.nn.inference_mode(only)(_x()), _x())


def test_state():
    """A stateful layer's state goes in and out, the same numbers as without amp."""
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axis_name="b", mode="batch")
    axes = {"axis_name": "b", "in_axes": (0, None), "out_axes": (0, None)}
    got, new = jax.vmap(amp(norm), **axes)(_x(8, 4), state)
    want, expected = jax.vmap(norm, **axes)(_x(8, 4), state)
    np.testing.assert_allclose(got, want, **LOW)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **LOW)


def test_modules_as_arguments():
    """A function that takes a module sees its fields as they are: numbers too."""

    @amp
    def loss(model, x):
        assert isinstance(model.rate, float)
        return jnp.sum(model(x))

    model = Net()
    np.testing.assert_allclose(loss(model, _x()), jnp.sum(model(_x())), rtol=0.1, atol=0.1)
    grads = eqx.filter_grad(loss)(model, _x())
    assert grads.layers[0].weight.dtype == jnp.float32
    assert loss(eqx.tree_at(lambda m: m.rate, model, 0.0), _x()).shape == ()


def test_functions_of_equinox():
    """filter_jit, filter_grad and a module's bound method under amp, and decorated methods."""
    np.testing.assert_allclose(amp(eqx.filter_jit(_mlp()))(_x()), _mlp()(_x()), **LOW)
    assert not isinstance(amp(eqx.filter_jit(jnp.tanh)), eqx.Module)
    grads = amp(eqx.filter_grad(lambda m, x: m(x).sum()))(_mlp(), _x())
    assert isinstance(grads, eqx.nn.MLP)

    class Decorated(eqx.Module):
        w: jax.Array

        @amp
        def __call__(self, x):
            nonlocal traces
            traces += 1
            return x @ self.w

    traces = 0
    for scale in (1.0, 2.0):
        np.testing.assert_allclose(Decorated(jnp.eye(4) * scale)(_x()), _x() * scale, **LOW)
    assert traces == 1


def test_train_step_returns_the_module():
    """A whole step under amp gives back a module of the same type with its constants."""

    @amp
    def step(model, x):
        grads = eqx.filter_grad(lambda m: jnp.sum(m(x) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))

    model = _mlp()
    new = step(step(model, _x()), _x())
    assert jax.tree.structure(new) == jax.tree.structure(model)
    assert new.activation is model.activation
    assert new.layers[0].weight.dtype == jnp.float32


def test_identity_and_nesting():
    """Under always_f32 the module computes as it is; amp of amp works."""
    model = _mlp()
    plain = str(jax.make_jaxpr(model)(_x()))
    assert str(jax.make_jaxpr(lambda x: amp(model, "always_f32")(x))(_x())) == plain
    np.testing.assert_array_equal(amp(amp(model))(_x()), amp(model)(_x()))


def test_dropped_module_dies():
    """Neither a module nor its arrays, nor functions inside it, are kept alive."""

    def call():
        w = jnp.ones((4, 4)) * 3

        def layer(x):
            return x @ w

        model = eqx.nn.Sequential([eqx.nn.Lambda(layer), eqx.nn.Linear(4, 4, key=KEY)])
        amped = amp(model)
        amped(_x())
        eqx.filter_grad(lambda m: m(_x()).sum())(amped)
        kept = (model, amped, model.layers[1].weight, w, layer)
        return [weakref.ref(thing) for thing in kept]

    references = call()
    gc.collect()
    assert [reference() for reference in references] == [None] * 5


def test_plan_and_errors():
    """A module's plan is that of its call; a module without a call is refused."""
    assert "bf16" in str(plan_of(_mlp())(_x()))
    assert str(plan_of(amp(_mlp(), "auto_mixed"))(_x())) == str(plan_of(_mlp(), "auto_mixed")(_x()))

    class Bag(eqx.Module):
        w: jax.Array

    with pytest.raises(NotCallableError, match="__call__"):
        amp(Bag(_x()))
