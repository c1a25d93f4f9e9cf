"""Calls: how a callable and its arguments are taken apart, and what tells constants apart."""

from __future__ import annotations

import enum
import functools
import gc
import types
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import amp
from jaxamp.trace.arguments import Layout, is_array
from jaxamp.trace.static_arguments import constant_key, hold
from jaxamp.trace.target import Target


def _layout(*args, **kwargs):
    leaves, treedef = Target.of(_function).flatten(args, kwargs)
    return leaves, Layout.of(treedef)


def _function(x, *rest, **options):
    return x


class Colour(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Config:
    n: int


class Plain:
    def method(self, x):
        return x

    def __call__(self, x):
        return x


def test_targets():
    """Partials, methods and callable objects are taken apart into function and bound values."""
    plain = Plain()
    method = Target.of(functools.partial(functools.partial(plain.method, 1, a=1), 2, a=2))
    assert (method.function, method.owner) == (Plain.method, plain)
    assert (method.args, method.kwargs, method.name) == ((1, 2), {"a": 2}, "method")
    called = Target.of(plain)
    assert (called.function, called.owner, called.name) == (Plain.__call__, plain, "Plain")
    jitted = jax.jit(_function)
    for fn in (_function, jitted, len, jnp.sin):
        assert (Target.of(fn).function, Target.of(fn).owner) == (fn, None)


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (np.ones(2), True),
        (np.float32(1), True),
        (np.bool_(True), True),
        (np.array(["a"], dtype=object), False),
        (np.array(["a"]), False),
        (np.datetime64("2020-01-01"), False),
        (1.0, False),
        (None, False),
        ("a", False),
    ],
)
def test_arrays(leaf, expected):
    """Numeric numpy values are arrays; numpy values of words, dates and objects are not."""
    assert is_array(leaf) is expected


def test_arrays_of_jax():
    """Arrays, keys, Refs and their tracers are arrays."""
    values = (jnp.ones(2), jax.random.key(0), jax.new_ref(jnp.ones(2)))
    assert all(is_array(value) for value in values)
    jax.jit(lambda *tracers: [is_array(t) or 1 / 0 for t in tracers] and None)(*values)


def test_conventions_of_containers():
    """What is traced depends on the kind of container that holds a number."""

    class Module(eqx.Module):
        rate: float
        inner: list

    registered = jax.tree_util.Partial(_function, 1, True, 2.0, "word")
    leaves, layout = _layout(
        1, True, 2.0, 3j, [4, 5.0], Module(6.0, [7, jnp.ones(1), 8.0]), registered
    )
    traced, keys = layout.split(leaves, {})
    assert [x for x in traced if not isinstance(x, jax.Array)] == [2.0, 3j, 5.0, 1, True, 2.0]
    constants = [leaf for leaf, key in zip(leaves, keys, strict=True) if key is not None]
    assert constants == [1, True, 4, 6.0, 7, 8.0, "word"]


def test_no_number_is_traced_in_a_staged_program():
    """What JAX was to trace is a tracer already; floats in registered containers are static too."""
    leaves, treedef = Target.of(_function).flatten((1.0, jax.tree_util.Partial(_function, 2.0)), {})
    assert Layout.of(treedef).split(leaves, {})[0] == [1.0, 2.0]
    assert Layout.of(treedef, staged=True).split(leaves, {})[0] == []


def test_names():
    """Leaves are named as the function knows them."""
    leaves, treedef = Target.of(functools.partial(_named, {"w": 1})).flatten(
        ([2], 3), {"flag": 4, "more": {"a": 5}}
    )
    names = Layout.of(treedef).names(_named)
    assert names == ["params['w']", "x[0]", "y", "flag", "more['a']"]
    assert len(leaves) == len(names)


def _named(params, x, y, *, flag, **more):
    return x


def test_names_of_a_container_that_checks_its_content():
    """A container that cannot hold placeholders costs only the names."""

    @jax.tree_util.register_pytree_node_class
    class Checked:
        def __init__(self, x):
            self.x = jnp.asarray(x)

        def tree_flatten(self):
            return (self.x,), None

        @classmethod
        def tree_unflatten(cls, _, leaves):
            return cls(*leaves)

    leaves, layout = _layout(Checked(jnp.ones(2)))
    assert layout.names(_function) == [""] * len(leaves)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, True),
        (0.0, -0.0),
        (0, 0.0),
        ("a", b"a"),
        (1j, -1j),
        (slice(0, 2), slice(0, 3)),
        (Config(1), Config(2)),
        (Plain(), Plain()),
        (lambda: 1, lambda: 1),
        ({1}, {1}),
        (types.SimpleNamespace(a=1), types.SimpleNamespace(a=1)),
        (Plain().method, Plain().method),
    ],
)
def test_keys_differ(one, two):
    """Different constants have different keys, also where Python calls them equal."""
    assert constant_key(one) != constant_key(two)


@pytest.mark.parametrize(
    "make",
    [
        lambda: 1.5,
        lambda: float("nan"),
        lambda: slice(0, 2),
        lambda: Config(1),
        lambda: Colour.RED,
        lambda: np.dtype("float32"),
        lambda: "wo" + "rd",
        lambda: len,
        lambda: _PLAIN.method,
    ],
)
def test_keys_agree(make):
    """Constants that mean the same have the same key and hash, made anew or not."""
    assert constant_key(make()) == constant_key(make())
    assert hash(constant_key(make())) == hash(constant_key(make()))


_PLAIN = Plain()


class Trainer:
    """A class that JAX knows nothing of, with an array in an attribute."""

    def __init__(self) -> None:
        self.w = jnp.eye(4)

    def predict(self, x):
        return x @ self.w


@pytest.mark.parametrize("transform", [amp, jax.jit])
def test_an_array_that_an_object_holds_is_a_constant(transform):
    """One that takes its place is seen by the next trace, as under ``jax.jit``."""
    trainer, x = Trainer(), jnp.ones((2, 4))
    predict = transform(trainer.predict)
    np.testing.assert_array_equal(predict(x), x)
    trainer.w = 2 * jnp.eye(4)
    np.testing.assert_array_equal(predict(x), x)
    np.testing.assert_array_equal(predict(x[:1]), 2 * x[:1])


def test_holding():
    """What is known by identity is held weakly and reported when it dies; values are kept."""
    dropped = []
    plain = Plain()
    for leaf in (plain, plain.method, Config(1), "word", [1]):
        held = hold(leaf, constant_key(leaf), dropped.append)
        assert held() == leaf
    weak = hold(plain, constant_key(plain), dropped.append)
    del plain, leaf
    gc.collect()
    assert weak() is None
    assert dropped == [weak]
