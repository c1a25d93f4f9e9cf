"""Calls: how a callable and its arguments are taken apart, and what tells constants apart."""

from __future__ import annotations

import enum
import functools
import gc
import types
import weakref
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import amp
from jaxamp.trace.arguments import Layout, Target, is_array
from jaxamp.trace.static_arguments import constant_key, hold


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
    traced, keys = layout.split(leaves)
    assert [x for x in traced if not isinstance(x, jax.Array)] == [2.0, 3j, 5.0, 1, True, 2.0]
    constants = [leaf for leaf, key in zip(leaves, keys, strict=True) if key is not None]
    assert constants == [1, True, 4, 6.0, 7, 8.0, "word"]


def test_concrete_layout():
    """Floats among the arguments can be made constants; those of containers stay as they are."""
    leaves, layout = _layout(1.0, jax.tree_util.Partial(_function, 2.0))
    concrete = layout.concrete(leaves)
    assert concrete is not None
    assert concrete.split(leaves)[0] == [2.0]
    assert layout.concrete([1, 2.0]) is None


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
    """A class that JAX knows nothing of, with arrays in its attributes."""

    def __init__(self) -> None:
        self.params = {"name": "linear", "w": jnp.eye(4), "b": [jnp.zeros(4)]}
        self.params["itself"] = [self.params]
        self.words, self.traced, self.calls = ["a"] * 3, 0, jnp.zeros(())

    @amp
    def predict(self, x):
        self.traced += 1
        return x @ self.params["w"] + self.params["b"][0]

    def __call__(self, x):
        return x @ self.params["w"]


@pytest.mark.parametrize("kind", [jnp, np], ids=["jax", "numpy"])
@pytest.mark.parametrize("style", ["method", "callable", "argument", "bound", "partial"])
def test_arrays_of_objects_are_not_stale(style, kind):
    """An array that an object is given anew is seen, in containers too.

    Nothing is traced for one that the trace has not captured.
    """
    trainer, x = Trainer(), jnp.ones((2, 4))
    call = {
        "method": trainer.predict,
        "callable": amp(trainer),
        "argument": functools.partial(amp(lambda t, x: t(x)), trainer),
        "bound": functools.partial(amp(lambda f, x: f(x)), trainer.__call__),
        "partial": amp(functools.partial(lambda t, x: t(x), trainer)),
    }[style]
    for scale in (1, 2, 3):
        trainer.params["w"] = scale * kind.eye(4, dtype=np.float32)
        for _ in range(3):
            trainer.calls = trainer.calls + 1
            np.testing.assert_array_equal(call(x), scale * x)
    assert trainer.traced == (3 if style == "method" else 0)


@pytest.mark.parametrize("weak", [True, False], ids=["weak", "strong"])
def test_arrays_in_slots_are_not_stale(weak):
    @dataclass(slots=True, weakref_slot=weak, eq=False)
    class Slotted:
        w: jax.Array

        def __call__(self, x):
            return x @ self.w

    class Derived(Slotted):
        """Has a dictionary beside the slots."""

    for cls in (Slotted, Derived):
        layer, x = cls(jnp.eye(4)), jnp.ones((2, 4))
        calls = amp(layer), functools.partial(amp(lambda f, x: f(x)), layer)
        for scale in (1, 2):
            layer.w = scale * jnp.eye(4)
            for call in calls:
                np.testing.assert_array_equal(call(x), scale * x)


class Layer:
    def __init__(self, scale: float) -> None:
        self.w, self.parent = scale * jnp.eye(4), None

    def __call__(self, x):
        return x @ self.w


class Model:
    """Objects that hold objects, of which some know who holds them."""

    def __init__(self) -> None:
        self.head = Layer(1)
        self.layers = [Layer(1), Layer(1)]
        self.body = self.layers[0].__call__
        self.best = self.layers  # another name for the same list
        self.head.parent = self.layers[0].parent = self
        self.traced = 0

    @amp
    def predict(self, x):
        self.traced += 1
        return self.head(self.layers[1](self.body(x)))


def _set_weight(model):
    model.layers[1].w = 2 * jnp.eye(4)


def _set_layer(model):
    model.layers[1] = Layer(2)


def _set_list(model):
    model.layers = [model.layers[0], Layer(2)]  # the former one is still there by another name


def _set_bound(model):
    model.body = Layer(2).__call__


def _delete(model):
    del model.head.w
    type(model.head).w = 2 * jnp.eye(4)


@pytest.mark.parametrize(
    "change", [_set_weight, _set_layer, _set_list, _set_bound, _delete], ids=lambda f: f.__name__
)
def test_arrays_of_objects_in_objects_are_not_stale(change, monkeypatch):
    monkeypatch.setattr(Layer, "w", None, raising=False)
    model, x = Model(), jnp.ones((2, 4))
    for _ in range(3):
        np.testing.assert_array_equal(model.predict(x), x)
    change(model)
    for _ in range(3):
        np.testing.assert_array_equal(model.predict(x), 2 * x)
    assert model.traced == 2


def test_arrays_that_change_places_are_seen():
    model, x = Model(), jnp.ones((2, 4))
    model.layers[0].w, model.layers[1].w = jnp.eye(4) + 1, 2 * jnp.triu(jnp.ones((4, 4)))
    first = model.predict(x)
    model.layers[0].w, model.layers[1].w = model.layers[1].w, model.layers[0].w
    second = model.predict(x)
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(second, x @ model.layers[0].w @ model.layers[1].w)


def test_objects_that_know_who_holds_them_die():
    """Only arrays are kept alive by a trace that has captured them."""
    model = Model()
    model.predict(jnp.ones((2, 4)))
    died = [weakref.ref(model), weakref.ref(model.layers[1])]
    del model
    gc.collect()
    assert [reference() for reference in died] == [None, None]


def test_former_arrays_of_an_object_die():
    """What was traced with them goes when the object has others, or dies."""

    def replaced():
        trainer = Trainer()
        old = [weakref.ref(trainer.params["w"]), weakref.ref(trainer)]
        for scale in (1, 2):
            trainer.params = {"w": scale * jnp.eye(4), "b": [jnp.zeros(4)]}
            trainer.predict(jnp.ones((2, 4)))
            old.append(weakref.ref(trainer.params["w"]))
        gc.collect()
        assert [reference() is None for reference in old] == [True, False, True, False]
        return old

    old = replaced()
    gc.collect()
    assert [reference() for reference in old[:3]] == [None] * 3


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
