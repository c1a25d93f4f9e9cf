"""Arguments of every kind, changed between calls: the plain program's numbers, or an error.

What a call may consist of is a table in docs/reference/arguments.md; its rows are tested here.
"""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import decimal
import enum
import functools
import random
import threading
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxamp import amp, plan_of
from jaxamp.errors import ArgumentError, OutputError

pytestmark = pytest.mark.filterwarnings("ignore:amp has traced")
X = np.arange(1.0, 5.0, dtype=np.float32)


class Kind(NamedTuple):
    """A kind of argument.

    Attributes:
      make: returns an argument that holds a value.
      put: puts another value into it, or returns an argument with that value.
      get: returns the value, in the function.
    """

    make: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]
    get: Callable[[Any], Any]


class Plain:
    """A class of no library."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def scaled(self, x: Any) -> Any:
        return x * self.value


class Slotted:
    """One without a dictionary."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Named(dict):
    """A dictionary with a class of its own."""


class Listed(list):
    """A list with a class of its own."""


class Equal:
    """Objects of it are equal, whatever they hold."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    def __hash__(self) -> int:
        return 1


@dataclasses.dataclass
class Data:
    value: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@dataclasses.dataclass(frozen=True)
class Beside:
    """A frozen class, in which a field does not count for equality."""

    name: str
    value: Any = dataclasses.field(compare=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    value: Any
    word: Any = dataclasses.field(default="a", metadata={"static": True})


class Module(eqx.Module):
    value: float
    word: Any = eqx.field(static=True, default="a")


def nnx_module(value: Any, word: Any) -> Any:
    """A module of flax nnx, whose attributes are static unless they are arrays."""
    module = nnx.Module()
    module.value, module.word = nnx.Variable(jnp.asarray(value)), word
    return module


class Pair(NamedTuple):
    first: Any
    value: Any


def _put_attribute(box: Any, value: Any) -> Any:
    box.value = value
    return box


def _put_item(key: Any) -> Callable[[Any, Any], Any]:
    def put(box: Any, value: Any) -> Any:
        box[key] = value
        return box

    return put


def _put_element(box: set[Any], value: Any) -> Any:
    box.clear()
    box.add(value)
    return box


def _value(box: Any) -> Any:
    return box.value


def _item(key: Any) -> Callable[[Any], Any]:
    return lambda box: box[key]


def _only(box: Iterable[Any]) -> Any:
    return next(iter(box))


def _anew(make: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda _, value: make(value)


def _objects(value: Any) -> np.ndarray:
    box = np.empty(1, dtype=object)
    box[0] = value
    return box


def _deep(value: Any) -> Plain:
    return Plain({"a": [(Slotted(Data(Named(b=value))),)]})


def _put_deep(box: Plain, value: Any) -> Plain:
    box.value["a"][0][0].value.value["b"] = value
    return box


# What can hold anything, an array as well.
HOLDERS = {
    "object": Kind(Plain, _put_attribute, _value),
    "object with slots": Kind(Slotted, _put_attribute, _value),
    "dataclass": Kind(Data, _put_attribute, _value),
    "namespace": Kind(lambda v: types.SimpleNamespace(value=v), _put_attribute, _value),
    "dict subclass": Kind(lambda v: Named(value=v), _put_item("value"), _item("value")),
    "UserDict": Kind(
        lambda v: collections.UserDict(value=v), _put_item("value"), _item("value")
    ),
    "ChainMap": Kind(lambda v: collections.ChainMap({"v": v}), _put_item("v"), _item("v")),
    "Counter": Kind(lambda v: collections.Counter({"v": v}), _put_item("v"), _item("v")),
    "list subclass": Kind(lambda v: Listed([v]), _put_item(0), _item(0)),
    "UserList": Kind(lambda v: collections.UserList([v]), _put_item(0), _item(0)),
    "object array": Kind(_objects, _put_item(0), _item(0)),
    "deep": Kind(_deep, _put_deep, lambda box: box.value["a"][0][0].value.value["b"]),
    "frozen": Kind(Frozen, _anew(Frozen), _value),
    "frozen, not compared": Kind(
        functools.partial(Beside, "a"), _anew(functools.partial(Beside, "a")), _value
    ),
    "equal": Kind(Equal, _anew(Equal), _value),
    "equal, changed": Kind(Equal, _put_attribute, _value),
    "namedtuple in an object": Kind(
        lambda v: Plain(Pair(0, v)), lambda box, v: _put_attribute(box, Pair(0, v)),
        lambda box: box.value.value,
    ),
}  # fmt: skip
HASHED = {
    "set": Kind(lambda v: {v}, _put_element, _only),
    "frozenset": Kind(lambda v: frozenset([v]), _anew(lambda v: frozenset([v])), _only),
}
# What holds a number and nothing else.
NUMBERS = {
    "tuple": Kind(lambda v: (v,), _anew(lambda v: (v,)), _item(0)),
    "namedtuple": Kind(lambda v: Pair(0, v), _anew(lambda v: Pair(0, v)), _value),
    "bytearray": Kind(lambda v: bytearray([int(v)]), _put_item(0), _item(0)),
    "array.array": Kind(lambda v: array.array("d", [v]), _put_item(0), _item(0)),
    "memoryview": Kind(lambda v: memoryview(bytearray([int(v)])), _put_item(0), _item(0)),
    "words": Kind(
        lambda v: np.array([str(v)], "U32"), lambda box, v: _put_item(0)(box, str(v)),
        lambda box: float({"True": 1, "False": 0}.get(str(box[0]), box[0])),
    ),
    "decimal": Kind(decimal.Decimal, _anew(decimal.Decimal), float),
    "random.Random": Kind(random.Random, lambda box, v: box.seed(v) or box, lambda b: b.random()),
    "generator of numpy": Kind(
        lambda v: np.random.default_rng(int(v)), _anew(lambda v: np.random.default_rng(int(v))),
        lambda b: b.random(),
    ),
    "iterator in an object": Kind(
        lambda v: Plain(iter([v])), lambda box, v: _put_attribute(box, iter([v])),
        lambda box: next(box.value),
    ),
}  # fmt: skip
KINDS = {**HOLDERS, **HASHED, **NUMBERS}


def _scaled(x: Any, box: Any, get: Any) -> Any:
    """Tell a value's type, too: True is not 1."""
    value = get(box)
    sign = np.copysign(1, value) if isinstance(value, float) else 1.0
    return jnp.tanh(x) * value + {bool: 1.0, int: 2.0, float: 3.0}.get(type(value), 4.0) * sign


def _compare(f: Any, x: Any, box: Any, get: Any) -> bool:
    """Compare with the plain program on a copy; return whether it was refused."""
    want = _scaled(x, _copied(box), get)
    try:
        got = f(x, box, get)
    except TypeError:
        return True
    np.testing.assert_allclose(got, want, rtol=1e-2)
    return False


def _copied(box: Any) -> Any:
    """What the plain program may consume."""
    return memoryview(bytearray(box)) if isinstance(box, memoryview) else copy.deepcopy(box)


@pytest.mark.parametrize("name", [*HOLDERS, *HASHED])
def test_arrays_inside_are_refused(name):
    """Whatever holds them, however deep, at the first call and not later."""
    kind = KINDS[name]
    value = np.zeros(4, np.float32) if name in HOLDERS else jax.new_ref(jnp.zeros(4))
    for call in (amp(_scaled), plan_of(_scaled), amp(_scaled).lower, amp(_scaled).eval_shape):
        with pytest.raises(ArgumentError, match=r"(?s)argument box of _scaled.*register"):
            call(X, kind.make(value), kind.get)
    with pytest.raises(TypeError):
        jax.jit(_scaled)(X, kind.make(value), kind.get)


@pytest.mark.parametrize("name", [*HOLDERS, *HASHED])
def test_an_array_that_comes_later_is_refused(name):
    """An object that held a number and holds an array now is another one."""
    kind, f = KINDS[name], amp(_scaled)
    box = kind.make(2.0)
    assert not _compare(f, X, box, kind.get)
    value = jnp.ones(4) if name in HOLDERS else jax.new_ref(jnp.zeros(4))
    with pytest.raises(ArgumentError):
        f(X, kind.put(box, value), kind.get)


@pytest.mark.parametrize("name", KINDS)
def test_what_changes_is_read_anew(name):
    """Numbers inside are those of the call; what has not changed is not traced again."""
    kind, traces = KINDS[name], []

    def counted(x: Any, box: Any, get: Any) -> Any:
        traces.append(1)
        return _scaled(x, box, get)

    f, box = amp(counted), kind.make(2)
    for value in (2, 3, True, 0, 1, 1, 2):
        box = kind.put(box, value)
        assert not _compare(f, X, box, kind.get)
    assert len(traces) <= 7
    if name in HOLDERS:
        before = len(traces)
        _compare(f, X, box, kind.get)
        assert len(traces) == before


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)),
    st.lists(
        st.sampled_from([0.0, -0.0, 0, False, 1, True, 1.0, 2, 2.5, "array", "numpy"]),
        min_size=2,
        max_size=5,
    ),
)
def test_any_argument_is_the_plain_program_s_or_refused(name, values):
    """A drawn kind of argument, changed between calls: equal numbers, or a TypeError."""
    kind, f = KINDS[name], amp(_scaled)
    if name in NUMBERS or name in HASHED:
        values = [v for v in values if not isinstance(v, str)]
    if name in ("bytearray", "memoryview", "tuple", "namedtuple"):  # floats of the last are traced
        values = [int(v) if isinstance(v, float) else v for v in values]
    arrays = {"array": jnp.full(4, 3.0), "numpy": np.full(4, 3.0, np.float32)}
    box = None
    for value in values:
        value = arrays.get(value, value) if isinstance(value, str) else value
        box = kind.make(value) if box is None else kind.put(box, value)
        assert _compare(f, X, box, kind.get) == isinstance(value, jax.Array | np.ndarray)


GLOBAL = types.SimpleNamespace(seen=0)
MADE = {
    "set": (lambda x: set(), lambda made: made.add(1)),
    "bytearray": (lambda x: bytearray(2), lambda made: made.append(1)),
    "namespace": (lambda x: types.SimpleNamespace(n=[1]), lambda made: made.n.append(1)),
    "object": (lambda x: Plain([1]), lambda made: made.value.append(1)),
    "dict subclass": (lambda x: Named(a=1), lambda made: made.clear()),
    "deque": (lambda x: collections.deque([1]), lambda made: made.append(2)),
    "equal": (lambda x: Equal([1]), lambda made: made.value.append(1)),
}


def _held(made: Any) -> Any:
    return getattr(made, "__dict__", None) or made


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("twice", [False, True])
def test_what_a_function_makes_is_made_anew(name, twice):
    """What a caller does to a result, no other call sees."""
    make, change = MADE[name]
    f = amp(lambda x: (jnp.tanh(x), [made := make(x), made if twice else None]))
    for _ in range(3):
        made = f(X)[1][0]
        assert _held(made) == _held(make(X))
        change(made)
        assert _held(made) != _held(make(X))


def test_what_was_there_before_comes_back_itself():
    """A result that the caller has given, or that the function captures, is no copy."""
    given, local, array_ = Plain(1), Plain(2), jnp.ones(3)

    def f(x, box):
        made = Plain(array_)
        return jnp.tanh(x), box, local, GLOBAL, made

    f = amp(f)
    for _ in range(2):
        _, *held, made = f(X, given)
        assert all(a is b for a, b in zip(held, (given, local, GLOBAL), strict=True))
        assert made.value is array_


def test_results_that_cannot_be_copied_are_refused():
    """A lock, say: each call of the plain program makes one of its own."""
    with pytest.raises(OutputError, match=r"made a lock.*cannot be copied"):
        amp(lambda x: (x, threading.Lock()))(X)


@pytest.mark.parametrize("make", [Registered, lambda v, b: Module(v, b), nnx_module])
@pytest.mark.parametrize("value", [3.0, 3 * X], ids=["number", "array"])
def test_an_object_in_a_static_field_is_read_anew(make, value):
    """What a field that JAX compares holds is that of the call, its arrays too."""
    box, f = Plain(2.0), amp(lambda x, tree: jnp.tanh(x) * tree.word.value)
    tree = make(1.0, box)
    for held in (2.0, value, 2.0, value):
        box.value = held
        np.testing.assert_allclose(f(X, tree), jnp.tanh(X) * held, rtol=1e-2)


def test_an_equal_object_that_has_changed_is_not_held():
    """A form for objects of one value is traced for new shapes with an object of that value."""
    f, one = amp(_scaled), Equal(2)
    f(X, one, _value)
    one.value = 3
    np.testing.assert_allclose(
        f(X[:2], Equal(2), _value), _scaled(X[:2], Equal(2), _value), rtol=1e-2
    )


# The table of docs/reference/arguments.md, row by row.

PAGE = Path(__file__).parents[2] / "docs/reference/arguments.md"
HOLDS_ARRAY = Plain([jnp.ones(4)])


class Colour(enum.Enum):
    RED = 1


def _itself(value: Any) -> Any:
    return value


# Per row: arguments, and what of them is looked at inside of the function.
ARGUMENTS = {
    "array of JAX or numpy, numpy scalar, key, `Ref`": (
        [jnp.ones(2), np.ones(2), np.float32(1), jax.random.key(0)], _itself,
    ),
    "`float`, `complex`": ([1.0, 1j], _itself),
    "`bool`, `int`": ([True, 3], _itself),
    "`str`, `bytes`": (["word", b"word"], _itself),
    "function, class, module, enum member": ([jnp.tanh, _itself, Plain, np, Colour.RED], _itself),
    "number in a registered class": ([Registered(1), Registered(True)], _value),
    "number in an equinox module": ([Module(1.0)], _value),
    "static field of a registered class": ([Registered(1.0, 7)], lambda box: box.word),
    "object without arrays: dict subclass, dataclass, namespace, set, `bytearray`, words": (
        [Named(a=1), Data(1), Frozen(1), types.SimpleNamespace(a=1), {1}, bytearray(1),
         np.array(["a"])], _itself,
    ),
    "object that holds an array, however deep": ([HOLDS_ARRAY, Equal(X), Named(a=X)], _itself),
    "bound method, `functools.partial`": (
        [HOLDS_ARRAY.scaled, functools.partial(_scaled, X)], _itself,
    ),
    "generator": ([(i for i in range(3))], _itself),
}  # fmt: skip
TRACED = {"traced": True, "static": False, "static: itself": False, "static, by its `==`": False,
          "static, by its `==`; an object that has none is read anew": False,
          "static, read anew": False, "static, read anew with its arrays": False}  # fmt: skip


def _rows() -> dict[str, list[str]]:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if "|" in line]
    return {name: words for name, *words in rows[2:]}


def _is_traced(transform: Any, argument: Any, get: Any) -> bool | None:
    """Whether a function sees a tracer; ``None`` where the argument is refused."""
    seen: list[bool] = []
    try:
        transform(lambda x, box: (seen.append(isinstance(get(box), jax.core.Tracer)), x)[1])(
            X, argument
        )
    except TypeError:
        return None
    return seen[0]


@pytest.mark.filterwarnings("ignore:Python iterable type 'generator'")
@pytest.mark.parametrize("row", ARGUMENTS)
def test_rows_of_arguments(row):
    """What the table says of an argument is what `amp` and ``jax.jit`` do with it."""
    arguments, get = ARGUMENTS[row]
    for transform, word in zip((amp, jax.jit), _rows()[row], strict=True):
        for argument in arguments:
            assert _is_traced(transform, argument, get) is TRACED.get(word), (transform, argument)


def test_each_row_has_a_test():
    """Those of ARGUMENTS, and the ones of containers and of what is bound below."""
    assert len(_rows()) == len(ARGUMENTS) + 6


@pytest.mark.parametrize("transform", [amp, jax.jit])
def test_row_of_containers(transform):
    """Each leaf by itself: an array and a float in them are traced."""
    for box in (
        (X, 1.0), [X, 1.0], {"a": X, "b": 1.0}, Pair(X, 1.0), collections.OrderedDict(a=X, b=1.0),
        collections.defaultdict(list, a=X, b=1.0),
    ):  # fmt: skip
        assert _is_traced(transform, box, lambda box: jax.tree.leaves(box)[0])
        assert _is_traced(transform, box, lambda box: jax.tree.leaves(box)[1])


@pytest.mark.parametrize("transform", [amp, jax.jit])
def test_row_of_declared_arguments(transform):
    """By hash and ``==``, though 1 and True are two values for `amp` inside of tuples too."""
    traces = []
    f = transform(lambda x, box: (traces.append(1), x)[1], static_argnums=1)
    for box in (Frozen(1), Frozen(1), Equal(X), Equal(X), (2, "a"), (2, "a")):
        f(X, box)
    assert len(traces) == 3
    with pytest.raises(ValueError, match="hash"):
        f(X, Data(1))
    if transform is amp:
        f(X, (True,)), f(X, (1,)), f(X, (1.0,))
        assert len(traces) == 6


@pytest.mark.parametrize("transform", [amp, jax.jit])
def test_row_of_self(transform):
    """The object of a decorated method is its first argument, and no constant."""

    class Layer(Plain):
        scale = transform(Plain.scaled)

    with pytest.raises(TypeError):
        Layer(X).scale(X)
    cls = jax.tree_util.register_pytree_node(
        Layer, lambda box: ((box.value,), None), lambda _, held: Layer(*held)
    )
    assert cls is None
    layer = Layer(X)
    np.testing.assert_allclose(layer.scale(X), X * X, rtol=1e-2)
    layer.value = 2 * X
    np.testing.assert_allclose(layer.scale(X), 2 * X * X, rtol=1e-2)


@pytest.mark.parametrize("transform", [amp, jax.jit])
@pytest.mark.parametrize(
    "bind", [lambda box: box.scaled, lambda box: functools.partial(Plain.scaled, box)]
)
def test_rows_of_what_is_bound(transform, bind):
    """It is read when it is traced; a function that is made anew reads anew."""
    box = Plain(2 * X)
    f = transform(bind(box))
    np.testing.assert_allclose(f(X), 2 * X * X, rtol=1e-2)
    box.value = 3 * X
    np.testing.assert_allclose(f(X), 2 * X * X, rtol=1e-2)
    if transform is amp:  # jax.jit finds an equal method while that lives
        np.testing.assert_allclose(transform(bind(box))(X), 3 * X * X, rtol=1e-2)


@pytest.mark.parametrize("transform", [amp, jax.jit])
def test_rows_of_closures_and_bound_arrays(transform):
    """A captured value is read when traced; an array bound by a partial is traced by `amp`."""
    scale, seen = 2.0, []

    def f(w, x):
        seen.append(isinstance(w, jax.core.Tracer))
        return w * x * scale

    bound = transform(functools.partial(f, X))
    np.testing.assert_allclose(bound(X), 2 * X * X, rtol=1e-2)
    scale = 3.0
    np.testing.assert_allclose(bound(X), 2 * X * X, rtol=1e-2)
    assert seen == [transform is amp]


def test_objects_with_arrays_under_a_trace_around_amp():
    """They are constants of that trace, whichever: the next one does not find them again."""
    box, f = Plain(2 * X), amp(_scaled)
    run = lambda x: jax.jit(lambda x: f(x, box, _value) + f(x, box, _value))(x)  # noqa: E731
    np.testing.assert_allclose(run(X), 2 * _scaled(X, box, _value), rtol=1e-2)
    box.value = 3 * X
    np.testing.assert_allclose(run(X), 2 * _scaled(X, box, _value), rtol=1e-2)
