"""The transform: what is traced and when, what stays alive, what a call may contain."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import inspect
import pickle
import threading
import time
import traceback
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify, io_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxamp
from jaxamp import Precision, PrecisionPolicy, amp, plan_of
from jaxamp.errors import NotCallableError, OutputError, PolicyError, StaticArgumentError
from jaxamp.run.amp import AmpFunction, inspected
from tests import audit

LOW = {"rtol": 2e-2, "atol": 2e-2}


def _x(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape or (4, 4))


class Counter:
    """A function that counts how often it is traced."""

    def __init__(self, fn):
        self.count = 0
        self.fn = fn

    def wrapped(self):
        """The counting function, a plain one."""

        def counted(*args, **kwargs):
            self.count += 1
            return self.fn(*args, **kwargs)

        return counted


def dense(x, w):
    return jnp.tanh(x @ w)


def _low_dots(fn, *args) -> int:
    """How many dots of `fn`'s jaxpr have low operands."""
    return sum(product.is_low for product in audit.products(jax.make_jaxpr(fn)(*args).jaxpr))


# What is traced, and when.


def test_traces_once_for_same_shapes():
    """Neither a second call nor a second `amp` of the same function traces again."""
    counter = Counter(dense)
    f = counter.wrapped()
    for _ in range(3):
        amp(f)(_x(), _x())
        amp(f)(_x() + 1, _x())
    assert counter.count == 1


def test_traces_again_for_new_shapes_dtypes_and_policies():
    """A new shape, dtype or policy is a new trace, once each."""
    counter = Counter(dense)
    f = counter.wrapped()
    for _ in range(2):
        amp(f)(_x(), _x())
        amp(f)(_x(2, 4), _x())
        amp(f)(_x().astype(jnp.bfloat16), _x())
        amp(f, "auto_mixed")(_x(), _x())
    assert counter.count == 4


def test_transformed_calls_trace_once():
    """Eager grad and vmap of an amped function reuse its trace."""
    counter = Counter(lambda x, w: dense(x, w).sum())
    f = counter.wrapped()
    for _ in range(3):
        jax.grad(amp(f))(_x(), _x())
    assert counter.count == 1
    for _ in range(3):
        jax.vmap(amp(f), in_axes=(0, None))(_x(3, 4, 4), _x())
    assert counter.count == 1


def test_python_numbers_of_arguments():
    """Floats are traced, so a new value costs nothing; bools and ints are constants."""
    counter = Counter(lambda x, rate, flag, n: (x * rate).reshape(n, -1) if flag else x)
    f = amp(counter.wrapped())
    for rate in (0.1, 0.2, 0.3):
        assert f(_x(), rate, True, 2).shape == (2, 8)
    assert counter.count == 1
    assert f(_x(), 0.1, False, 2).shape == (4, 4)
    assert f(_x(), 0.1, True, 8).shape == (8, 2)
    assert counter.count == 3


@pytest.mark.parametrize("array", [jnp.array(True), jnp.array(3), jnp.array(0.5), jnp.ones(3)])
def test_a_number_in_the_place_of_an_array(array):
    """Whether an array came first or not, a Python bool or int is a constant of the trace."""

    def kind(x, n):
        return x @ x, isinstance(n, jax.Array)

    f = amp(kind)
    for n, traced in ((array, True), (True, False), (3, False), (0.5, True), (array, True)):
        assert f(_x(), n)[1] is traced


@pytest.mark.parametrize("other", ["word", None, np.ones, object(), 10**30, {"a": 1}])
def test_other_objects_after_arrays(other):
    """What is no array reaches the function as it is, though calls with an array came before."""
    f = amp(lambda x, y: (x @ x, y))
    for y in (_x(), other, _x()):
        np.testing.assert_array_equal(f(_x(), y)[1], y)
    assert f(_x(), other)[1] == other


def test_a_failing_call_with_arrays_is_traced_once():
    """The function's own error is not taken for a call that needs another way."""
    counter = Counter(lambda x, w: jnp.dot(x, w))
    with pytest.raises(TypeError, match="dot_general"):
        amp(counter.wrapped())(_x(2, 3), _x(2, 3))
    assert counter.count == 1


def test_one_trace_for_eager_and_traced_calls():
    """Whoever calls, the trace for arrays of one type is the same."""
    counter = Counter(lambda x, w: (dense(x, w), "beside"))
    f = amp(counter.wrapped())
    assert f(_x(), _x())[1] == "beside"
    jax.make_jaxpr(lambda x, w: f(x, w)[0])(_x(), _x())
    jax.grad(lambda x, w: f(x, w)[0].sum())(_x(), _x())
    assert counter.count == 1


def _scaled(x, rate):
    return x if rate == 0.0 else x * rate


@pytest.mark.parametrize("statics", [{"static_argnums": 1}, {"static_argnames": "rate"}])
def test_float_whose_value_is_needed(statics):
    """A function that branches on a static float gets its value, one trace for each value."""
    counter = Counter(_scaled)
    f = counter.wrapped()
    f.__signature__ = inspect.signature(_scaled)
    f = amp(f, **statics)
    for _ in range(2):
        np.testing.assert_array_equal(f(_x(), 0.0), _x())
        np.testing.assert_allclose(f(_x(), rate=2.0), 2 * _x(), **LOW)
    assert counter.count == 2


def test_a_function_that_fails_is_run_once():
    """A float whose value is needed is an error, as under ``jax.jit``, and is not tried again."""
    for call in (amp, jax.jit):
        counter = Counter(_scaled)
        f = call(counter.wrapped())
        with pytest.raises(jax.errors.TracerBoolConversionError):
            f(_x(), 0.5)
        assert counter.count == 1


def test_float_static_in_inner_jit():
    """What an inner jit declares static is static, by position, by name and behind a partial."""

    def f(w, x, p):
        return x * (2 if p == 0.5 else 1)

    inner = jax.jit(f, static_argnums=2)
    np.testing.assert_allclose(amp(inner)(0, _x(), 0.5), 2 * _x(), **LOW)
    np.testing.assert_allclose(amp(functools.partial(inner, 0))(_x(), 0.5), 2 * _x(), **LOW)
    np.testing.assert_allclose(amp(functools.partial(inner, 0))(_x(), p=0.5), 2 * _x(), **LOW)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Config:
    """A container of numbers that JAX knows."""

    layers: int
    flip: bool
    scale: float


def configured(x, config):
    for _ in range(config.layers):
        x = x @ x
    return -x * config.scale if config.flip else x


@functools.partial(jax.jit, static_argnums=0)
def _jitted_apart(config, x):
    return configured(x, config)


CONFIG = Config(2, True, 0.5)
STATIC_CONFIG = {
    "amp": amp(configured, static_argnums=1),
    "amp by name": amp(static_argnames="config")(configured),
    "amp of jit": amp(jax.jit(configured, static_argnums=1)),
    "jit of amp": jax.jit(amp(configured), static_argnums=(1,)),
    "jit of a partial": lambda x, c: jax.jit(functools.partial(amp(configured), config=c))(x),
    "jit of a closure": lambda x, c: jax.jit(lambda x: amp(configured)(x, c))(x),
    "amp of a partial": lambda x, c: amp(functools.partial(configured, config=c))(x),
    "amp of a jitted partial": lambda x, c: amp(jax.jit(functools.partial(configured, config=c)))(
        x
    ),
    "closure": lambda x, c: amp(lambda x: configured(x, c))(x),
}


@pytest.mark.parametrize("placement", STATIC_CONFIG)
def test_static_configurations(placement):
    """A registered container of Python numbers is static where amp or a jit is told so."""
    call = STATIC_CONFIG[placement]
    expected = amp(lambda x: -(x @ x @ (x @ x)) * 0.5)(_x())
    for _ in range(2):
        np.testing.assert_allclose(call(_x(), Config(2, True, 0.5)), expected, rtol=0.1, atol=0.1)
    np.testing.assert_array_equal(call(_x(), Config(0, False, 1.0)), _x())


LOOKS = [
    "plan_of",
    pytest.param("report", marks=pytest.mark.feature("inspect", "compiled", "found")),
    pytest.param("explain", marks=pytest.mark.feature("inspect")),
    pytest.param("probe", marks=pytest.mark.feature("numerics", "inspect", "xla")),
]


@pytest.mark.parametrize("placement", ["amp", "amp of jit", "jit of amp"])
@pytest.mark.parametrize("look", LOOKS)
def test_static_configurations_are_looked_at(placement, look):
    """What looks at a program takes its static arguments as its calls do."""
    look = getattr(jaxamp, look)
    look(STATIC_CONFIG[placement])(_x(), CONFIG)


@pytest.mark.parametrize("look", LOOKS)
def test_bound_configurations_are_looked_at(look):
    """What looks at a program takes a configuration that is bound, under amp and plain."""
    look = getattr(jaxamp, look)
    look(functools.partial(configured, config=CONFIG))(_x())
    look(amp(functools.partial(configured, config=CONFIG)))(_x())


@pytest.mark.parametrize("inner", [configured, lambda x, config: _jitted_apart(config, x)])
def test_undeclared_configuration_is_named(inner):
    """The error of a traced configuration names the argument, and the cure works."""
    with pytest.raises((jax.errors.JAXTypeError, ValueError)) as found:
        amp(inner)(_x(), CONFIG)
    assert "static_argnames='config'" in "".join(found.value.__notes__)
    assert amp(inner, static_argnames="config")(_x(), CONFIG).shape == _x().shape


@pytest.mark.parametrize(
    "call",
    [
        lambda x: amp(jax.jit(configured))(x, CONFIG),
        lambda x: amp(jax.jit(configured), static_argnames="config")(x, CONFIG),
        lambda x: amp(functools.partial(jax.jit(configured), config=CONFIG))(x),
    ],
    ids=["undeclared", "declared for amp", "bound around jit"],
)
def test_configurations_that_a_jit_inside_traces_are_named(call):
    """They are declared where the function is jitted, and nowhere else."""
    with pytest.raises(jax.errors.JAXTypeError) as found:
        call(_x())
    assert "jax.jit(configured, static_argnames='config')" in "".join(found.value.__notes__)
    amp(jax.jit(configured, static_argnames="config"))(_x(), CONFIG)
    amp(jax.jit(functools.partial(configured, config=CONFIG)))(_x())


def test_an_object_under_jit_is_named():
    """JAX's own message has the argument and the cure where `amp` is given a jitted function."""
    config = type("Plain", (), {"layers": 2})()
    with pytest.raises(TypeError, match=r"(?s)at path config.*static_argnums or static_argnames"):
        amp(jax.jit(configured))(_x(), config)


@pytest.mark.parametrize("member", ["lower", "trace", "eval_shape"])
@pytest.mark.parametrize("config", [CONFIG, (2, "relu")], ids=["numbers", "words"])
def test_undeclared_configuration_is_named_ahead_of_time(member, config):
    """So it is where a call is lowered, traced or looked at."""
    with pytest.raises(TypeError) as found:
        getattr(amp(configured), member)(_x(), config)
    assert "static_argnames='config'" in "".join(found.value.__notes__)


def test_errors_of_other_kinds_get_no_advice():
    """A branch on an array, or a value error of the function, is nothing that a static cures."""

    def fails(x, rate):
        if rate is None:
            raise ValueError("no rate")
        return x if x.sum() > 0 else -x

    for rate in (jnp.ones(()), None):
        with pytest.raises((jax.errors.JAXTypeError, ValueError)) as found:
            amp(fails)(_x(), rate)
        assert "static_argnames" not in "".join(getattr(found.value, "__notes__", ()))


def test_members_of_a_jitted_function():
    """An amped function is lowered, traced and looked at ahead of time as a jitted one is."""
    f = amp(configured, static_argnames="config")
    x, spec = _x(), jax.ShapeDtypeStruct(_x().shape, jnp.float32)
    for args, kwargs in (((spec, CONFIG), {}), ((spec,), {"config": CONFIG})):
        compiled = f.lower(*args, **kwargs).compile()
        np.testing.assert_array_equal(compiled(x), f(x, CONFIG))
        assert "bf16" in str(f.trace(*args, **kwargs).jaxpr)
        assert f.eval_shape(*args, **kwargs) == spec
    of_jit = amp(jax.jit(configured, static_argnums=1))
    np.testing.assert_array_equal(of_jit.lower(spec, CONFIG).compile()(x), f(x, CONFIG))
    f.clear_cache()
    np.testing.assert_array_equal(f(x, CONFIG), compiled(x))


def test_constants_of_a_call_that_is_lowered():
    """Words, ints and functions are static when lowered as they are when called."""
    f = amp(lambda x, axis, name, act: act(getattr(jnp, name)(x @ x, axis)))
    compiled = f.lower(_x(), 0, "max", jnp.tanh).compile()
    np.testing.assert_array_equal(compiled(_x()), f(_x(), 0, "max", jnp.tanh))


def test_clear_cache_traces_again():
    """What is compiled is dropped, and the next call makes it anew."""
    traces = []

    def f(x, n=1):
        traces.append(n)
        return x @ x

    amped = amp(f)
    for call in (lambda: amped(_x()), lambda: amped(_x(), 2)):
        call(), call()
        before = len(traces)
        amped.clear_cache()
        call(), call()
        assert len(traces) == before + 1


def test_static_arguments_that_cannot_be():
    """The error names the argument, and says what to do."""
    with pytest.raises(StaticArgumentError, match="config has to be hashable"):
        amp(configured, static_argnames="config")(_x(), config={"layers": 2})
    with pytest.raises(StaticArgumentError, match="config"):
        amp(configured, static_argnames="confg")
    with pytest.raises(StaticArgumentError, match="takes 2"):
        amp(configured, static_argnums=2)
    with pytest.raises(StaticArgumentError, match="write static_argnames='config'"):
        amp(configured, static_argnums="config")
    with pytest.raises(StaticArgumentError, match="write static_argnums=1"):
        amp(configured, static_argnames=1)


def test_static_arguments_that_something_around_has_traced():
    """The error says where to declare them static as well, and that is a cure."""
    gradient = jax.grad(lambda x, config: amp(configured, static_argnums=1)(x, config).sum())
    with pytest.raises(StaticArgumentError, match="transformation around amp traces") as found:
        plan_of(gradient)(_x(), CONFIG)
    assert "jax.jit(fn, static_argnums=1)" in str(found.value)
    assert str(plan_of(jax.jit(gradient, static_argnums=1))(_x(), CONFIG))


def test_signed_zero_and_nan_constants_are_told_apart():
    """Constants are compared by what they are: -0.0 is not 0.0, True is not 1, nan is nan."""
    counter = Counter(lambda x, box: x)
    f = counter.wrapped()
    for bound in (0.0, -0.0, float("nan"), float("nan"), 1, True, 1.0, 1j):
        amp(functools.partial(f, box=bound))(_x())
    assert counter.count == 7


class State(NamedTuple):
    step: int
    w: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    step: int | jax.Array
    w: jax.Array


def test_numbers_in_registered_containers_are_traced():
    """A step counter in a registered class is data, as it is for jit."""
    counter = Counter(lambda s: TrainState(s.step + 1, s.w * 0.5))
    f = amp(counter.wrapped())
    state = TrainState(0, _x())
    for _ in range(4):
        state = f(state)
    assert counter.count <= 2  # a Python int first, an array from then on
    assert int(state.step) == 4


def test_numbers_in_builtin_containers_are_constants():
    """A shape in a tuple, a size in a dict or namedtuple is a constant."""
    f = amp(lambda x, shape, cfg, s: x.reshape(shape)[: cfg["n"]] * s.w.reshape(s.step, -1))
    out = f(_x(), (2, 8), {"n": 1}, State(2, jnp.ones((2, 8))))
    assert out.shape == (2, 8)


def test_constant_arguments_of_many_kinds():
    """Words, functions, dtypes, slices, sets and None reach the function as they are."""
    counter = Counter(lambda x, **o: (o["act"](x[o["cut"]]).astype(o["dtype"]), o))
    f = amp(counter.wrapped())
    options = {
        "act": jnp.tanh,
        "cut": slice(0, 2),
        "dtype": jnp.float32,
        "word": "relu",
        "unhashable": {1, 2},
        "none": None,
        "objects": np.array(["a", None], dtype=object),
    }
    for _ in range(2):
        out, back = f(_x(), **options)
        assert out.shape == (2, 4)
        assert all(back[name] is value for name, value in options.items() if name != "cut")
    f(_x(), **{**options, "cut": slice(0, 2)})
    assert counter.count == 1


def test_arguments_bound_by_partial():
    """A partial's arrays are arguments, not constants; its numbers are constants."""
    counter = Counter(lambda w, x, *, n: (x @ w).reshape(n, -1))
    f = counter.wrapped()
    for scale in (1.0, 2.0):
        bound = functools.partial(f, _x() * scale, n=2)
        np.testing.assert_allclose(amp(bound)(_x()), bound(_x()), **LOW)
    assert counter.count == 3  # one under amp, two here


def test_keyword_arguments_and_defaults():
    """Arguments by position, by keyword and by default mean the same."""
    f = amp(lambda x, w=None, *, flip=False: -(x @ w) if flip else x @ w)
    expected = f(_x(), _x())
    np.testing.assert_array_equal(f(x=_x(), w=_x()), expected)
    np.testing.assert_array_equal(f(_x(), _x(), flip=True), -expected)


def test_warns_of_needless_traces():
    """An int that changes with each call is reported once, by name."""
    f = amp(lambda x, step: x @ x * step)

    def loop():
        for step in range(40):
            f(_x(), step)

    with pytest.warns(UserWarning, match="step keeps changing") as caught:
        loop()
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_the_warning_of_needless_traces_has_a_name():
    """It is there for a container that takes nothing but arrays, too."""

    @jax.tree_util.register_pytree_node_class
    class Checked:
        def __init__(self, w):
            self.w = jnp.asarray(w)

        def tree_flatten(self):
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, _, leaves):
            return cls(*leaves)

    f = amp(lambda box, step: box.w @ box.w * step)
    for step in range(15):
        f(Checked(_x()), step)
    with pytest.warns(UserWarning, match="because step keeps changing"):
        f(Checked(_x()), 15)


@pytest.mark.product("value")
@pytest.mark.parametrize("value", [np.int64(3), np.int64(2**40), np.uint8(7), 1.7e9, 1.7e9 + 0.125])
@pytest.mark.parametrize("x64", [False, True])
def test_numbers_are_what_they_are_under_jit(value, x64):
    """As arguments, and as results where a jitted function returns an array for them."""
    with jax.enable_x64(x64):
        for policy in ("mixed_bf16", "mixed_f16"):
            for fn in (lambda x, n: (n, n * x[0], x @ x), lambda x, n: (jnp.sin(n / 3600), x @ x)):
                got, want = amp(fn, policy)(_x(), value), jax.jit(fn)(_x(), value)
                for one, other in zip(got[:-1], want[:-1], strict=True):
                    assert (one.dtype, one.weak_type) == (other.dtype, other.weak_type)
                    np.testing.assert_allclose(one, other, rtol=1e-6)
        if isinstance(value, np.generic):
            got, want = (t(lambda x: (x @ x, value))(_x())[1] for t in (amp, jax.jit))
            assert (got, got.dtype) == (want, want.dtype)


@pytest.mark.parametrize("order", [lambda f: f, jax.jit, jax.grad])
def test_freeing_a_ref_twice_fails_as_in_jax(order):
    """The error that JAX raises where such a program is compiled is raised under amp."""

    def twice(x):
        ref = jax.new_ref(x)
        y = ref[...]
        jax.free_ref(ref)
        jax.free_ref(ref)
        return jnp.sum(y @ y)

    errors = []
    for transform in (jax.jit, amp):
        with pytest.raises(Exception) as found:
            order(transform(twice))(_x())
        errors.append(found.type)
    assert errors[0] is errors[1]


@pytest.mark.parametrize("jitted", [False, True])
def test_a_call_in_a_region_is_in_the_region(jitted):
    """A function that amp has made before is kept where it is called in one, and only there."""
    f = amp(dense)
    inside = jax.jit(lambda x, w: f(x, w)) if jitted else f

    def region(x, w):
        with jaxamp.keep_precision("f32"):
            return inside(x, w)

    for _ in range(2):
        assert _low_dots(inside, _x(), _x()) == 1
        assert _low_dots(region, _x(), _x()) == 0
        assert _low_dots(jaxamp.keep_precision("f32")(inside), _x(), _x()) == 0
        np.testing.assert_allclose(region(_x(), _x()), dense(_x(), _x()), rtol=1e-6)
        assert not np.allclose(inside(_x(), _x()), dense(_x(), _x()), rtol=1e-6)
    assert _low_dots(amp(region, "mixed_f16"), _x(), _x()) == 0
    assert _low_dots(amp(lambda x, w: f(x, w), "f32"), _x(), _x()) == 1  # a policy is no region


def test_registering_a_kind_plans_anew():
    """What is registered after a first call counts in the next."""
    counter = Counter(dense)
    f = amp(counter.wrapped())
    f(_x(), _x())
    primitive = jax.extend.core.Primitive("jaxamp_test_transform_primitive")
    jaxamp.register_op_kind(primitive, jaxamp.OpKind.ELEMENTWISE)
    f(_x(), _x())
    assert counter.count == 2


# What comes back.


def test_structure_dtypes_and_other_values_come_back():
    """The result has the function's own structure; what is no array is returned as it is."""

    def f(x):
        return {"y": x @ x, "n": x.shape[0], "word": "hi", "none": None, "i": jnp.arange(3)}, [1.5]

    out, rest = amp(f)(_x())
    assert (out["n"], out["word"], out["none"], rest) == (4, "hi", None, [1.5])
    assert (out["y"].dtype, out["i"].dtype) == (jnp.float32, jnp.int32)
    assert amp(lambda: 3)() == 3


def test_constant_results_follow_the_shape():
    """A Python value computed from shapes is right for each of the compiled forms."""
    f = amp(lambda x: (x.sum(), x.shape))
    assert [f(_x(n, 2))[1] for n in (1, 2, 1, 3, 2)] == [(1, 2), (2, 2), (1, 2), (3, 2), (2, 2)]


def test_weak_types_are_kept():
    """A weakly typed argument gives a weakly typed result, as without amp."""
    out = jax.eval_shape(amp(lambda s: s * 2), 1.5)
    assert out.weak_type
    assert amp(lambda s, x: s * x)(1.5, _x().astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("policy", ["auto_mixed_bf16", "auto_mixed", "always_f16"])
def test_lowers(policy):
    """A call computes in the policy's low precision and still returns float32."""
    assert amp(dense, policy)(_x(), _x()).dtype == jnp.float32
    assert not np.array_equal(amp(dense, policy)(_x(), _x()), dense(_x(), _x()))
    np.testing.assert_allclose(amp(dense, policy)(_x(), _x()), dense(_x(), _x()), **LOW)


# The identity policy.


def test_identity_gives_the_same_jaxpr():
    """Under always_f32 nothing is added to the program."""
    for fn in (dense, lambda x, w: jax.lax.scan(lambda c, _: (dense(c, w), c), x, None, 3)):
        plain, same = (str(jax.make_jaxpr(f)(_x(), _x())) for f in (fn, amp(fn, "always_f32")))
        assert plain == same


def test_identity_inside_amp_stays_f32():
    """A function that asks for float32 keeps it inside a function that does not."""
    inner = amp(dense, "always_f32")
    assert _low_dots(amp(lambda x, w: inner(x, w) @ w @ w), _x(), _x()) == 2
    assert _low_dots(amp(lambda x, w: dense(x, w) @ w @ w), _x(), _x()) == 3
    assert _low_dots(amp(inner), _x(), _x()) == 0


def test_inner_amp_is_left_alone():
    """A function amped under one policy is not rewritten again by the policy around it."""
    inner = amp(lambda x, w: jnp.tanh(x @ w) @ w, "auto_mixed")
    text = str(jax.make_jaxpr(amp(lambda x, w: inner(x, w)))(_x(), _x()))
    assert text.count("jaxamp_region") == 2
    assert " f16[" in text.replace(":", " ")
    assert "bf16[" not in text


def test_what_is_inspected_goes_through_the_rewriter():
    """Even under always_f32, which leaves it as it is bit for bit."""
    forced = inspected(dense, "always_f32")
    assert "jaxamp_region_dense" in str(jax.make_jaxpr(forced)(_x(), _x()))
    np.testing.assert_array_equal(forced(_x(), _x()), jax.jit(dense)(_x(), _x()))


# How it composes.


def test_adds_to_the_trace_around_it():
    """Under jit, vmap, grad and scan it is part of their program, with captured tracers."""

    def outer(x, w):
        return amp(lambda y: dense(y, w).sum())(x)

    expected = jax.grad(lambda x, w: dense(x, w).sum(), argnums=1)(_x(), _x())
    np.testing.assert_allclose(jax.grad(outer, argnums=1)(_x(), _x()), expected, **LOW)
    np.testing.assert_allclose(jax.jit(jax.grad(outer, argnums=1))(_x(), _x()), expected, **LOW)
    assert jax.vmap(outer)(_x(3, 4, 4), _x(3, 4, 4)).shape == (3,)
    carry, _ = jax.lax.scan(lambda c, _: (amp(lambda y: y @ c * 0.1)(_x()), None), _x(), None, 3)
    assert carry.shape == (4, 4)


def test_captured_constants():
    """Arrays that the function captures are used as they are."""
    w = _x()
    np.testing.assert_allclose(amp(lambda x: x @ w)(_x()), _x() @ w, **LOW)


def test_donation():
    """Buffers donated by a jit around amp are donated, by position and by name."""
    for options in ({"donate_argnums": 0}, {"donate_argnames": "p"}):
        p = _x() + 0
        jax.jit(amp(lambda p, x: p + x), **options)(p, x=_x())
        assert p.is_deleted()


def test_jit_inside_and_outside():
    """amp of a jitted function and jit of an amped one, with static arguments in either."""

    def f(x, mode, k=2):
        return x * k if mode == "times" else x / k

    inside = amp(jax.jit(f, static_argnums=1, static_argnames="k"))
    outside = jax.jit(amp(f), static_argnames=("mode", "k"))
    for g in (inside, outside):
        np.testing.assert_allclose(g(_x(), "times", k=3), 3 * _x(), **LOW)


@pytest.mark.parametrize("order", [lambda f: amp(f), lambda f: amp(jax.grad(f))])
def test_nested_jit_is_rewritten_once(order):
    """Calls of one jitted function stay calls of its name, of one jaxpr for equal dtypes."""
    layer = jax.jit(dense)

    def layers(x, w):
        for _ in range(6):
            x = layer(x, w)
        return (x @ w).sum()

    jaxpr = jax.make_jaxpr(order(layers))(_x(), _x()).jaxpr
    calls = [e.params for e in audit.equations(jaxpr) if e.params.get("name") == "dense"]
    passes = 1 if len(calls) == 6 else 2
    assert len(calls) == 6 * passes
    distinct = {id(params["jaxpr"]) for params in calls}
    assert len(distinct) <= 3 * passes  # the first and the last have neighbours of their own


def test_export():
    """A jitted amped function is exported, also with symbolic shapes."""
    exported = jax.export.export(jax.jit(amp(dense)))
    (batch,) = jax.export.symbolic_shape("b")
    again = jax.export.deserialize(
        exported(jax.ShapeDtypeStruct((batch, 4), jnp.float32), _x()).serialize()
    )
    np.testing.assert_array_equal(again.call(_x(7, 4), _x()), jax.jit(amp(dense))(_x(7, 4), _x()))


def test_refs():
    """Refs are arguments and captures that a call writes to."""
    ref = jax.new_ref(jnp.zeros((4, 4)))

    def add(ref, x):
        ref[...] = ref[...] + x

    amp(add)(ref, _x())
    jax.jit(amp(add))(ref, _x())
    np.testing.assert_array_equal(ref[...], _x() + _x())


def test_keys():
    """Random keys go in and out, and what is drawn is drawn as before."""
    key = jax.random.key(1)
    assert amp(jax.random.split)(key).dtype == key.dtype
    draw = functools.partial(jax.random.normal, shape=(8,))
    np.testing.assert_array_equal(amp(draw)(key), draw(key))


def test_shardings():
    """Shardings of the arguments reach the function and its result."""
    mesh = jax.make_mesh((4,), ("i",))
    x = jax.device_put(_x(8, 4), NamedSharding(mesh, PartitionSpec("i")))
    with jax.set_mesh(mesh):
        out = amp(dense)(x, _x())
    assert out.sharding.spec == PartitionSpec("i", None)


def test_shard_map_and_axis_names():
    """Inside shard_map and a named vmap the axis names are known."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))

    def total(x):
        return jax.lax.psum(x.T @ x, "i")

    specs = {"mesh": mesh, "in_specs": PartitionSpec("i"), "out_specs": PartitionSpec()}
    for f in (amp(jax.shard_map(total, **specs)), jax.shard_map(amp(total), **specs)):
        np.testing.assert_allclose(f(_x(8, 4)), _x(8, 4).T @ _x(8, 4), rtol=5e-2, atol=5e-2)
    mean = jax.vmap(amp(lambda x: x / jax.lax.psum(1.0, "b")), axis_name="b")(_x(2, 4))
    np.testing.assert_allclose(mean, _x(2, 4) / 2, **LOW)


def test_disable_jit():
    """Without jit the program runs one operation at a time, loops and branches included."""

    def f(x):
        y = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5), (0, x))[1]
        y = jax.lax.scan(lambda c, _: (c @ x, None), y, None, length=2)[0]
        return jax.lax.cond(True, jax.jit(jnp.sin), jnp.cos, y)

    with jax.disable_jit(), pytest.warns(UserWarning, match="jax.debug.print"):
        out = amp(f)(_x())
    np.testing.assert_allclose(out, amp(f)(_x()), **LOW)


def test_leak_checker():
    """JAX's own checker finds no tracer that outlives its trace."""
    with jax.checking_leaks():
        amp(dense)(_x(), _x())
        jax.grad(lambda w: amp(lambda x: dense(x, w).sum())(_x()))(_x())


def test_x64():
    """The setting of 64 bits counts at each call."""
    f = amp(lambda x, s: x * s)
    assert f(np.ones(2), 2.0).dtype == jnp.float32
    with jax.enable_x64(True):
        assert f(np.ones(2), 2.0).dtype == jnp.float64
    assert f(np.ones(2), 2.0).dtype == jnp.float32


def test_effects_happen_once_and_in_order():
    """Prints and ordered callbacks run at each call, in order."""
    seen = []

    def f(x):
        io_callback(lambda v: seen.append(int(v)), None, x[0], ordered=True)
        io_callback(lambda v: seen.append(int(v)), None, x[1], ordered=True)
        return x @ x

    for _ in range(2):
        amp(f)(jnp.array([1.0, 2.0]))
    jax.effects_barrier()
    assert seen == [1, 2, 1, 2]


SQUARES = jnp.eye(64) * 1.5
CHECKED = {
    "product": lambda x, w: x @ w,
    "convolution": lambda x, w: jnp.convolve(x[0], w[0]),
    "loop": lambda x, w: jax.lax.scan(lambda h, _: (h @ w, None), x, length=2)[0],
    "lookup": lambda x, w: jnp.take_along_axis(
        jax.nn.log_softmax(jnp.ones((2, 64)) @ w), jnp.array([[3], [999]]), 1
    ),
}


@pytest.mark.product("name")
@pytest.mark.parametrize("policy", ["auto_mixed", "fp8_current"])
@pytest.mark.parametrize("name", CHECKED)
def test_checkify_finds_what_it_finds_in_the_original(name, policy):
    policy = PrecisionPolicy.parse(policy)
    policy = policy.replace(scaling={"small": ()}) if policy.is_scaled else policy

    def found(fn, value):
        checked = checkify.checkify(fn, errors=checkify.nan_checks | checkify.index_checks)
        message = jax.jit(checked)(jnp.full((2, 64), value), SQUARES)[0].get()
        return message and message.splitlines()[0]

    for value in (1.0, jnp.nan):
        assert found(amp(CHECKED[name], policy), value) == found(CHECKED[name], value)
    assert found(CHECKED[name], jnp.nan)


def test_threads():
    """Threads that call at once share one trace and agree."""
    counter = Counter(lambda x, w: (time.sleep(0.1), dense(x, w))[1])
    f, results = counter.wrapped(), []
    calls = [lambda: results.append(amp(f)(_x(), _x()))] * 8
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.count == 1
    assert len(results) == 8
    assert all(np.array_equal(results[0], result) for result in results)


# Methods and other callables.


TRACES: collections.Counter[int] = collections.Counter()


class Scale:
    def __init__(self, w):
        self.w = w

    @amp
    def decorated(self, x):
        return x @ x * self.w

    @amp(policy="auto_mixed")
    def with_policy(self, x):
        return x @ x * self.w

    def plain(self, x):
        TRACES[id(self)] += 1
        return x @ self.w

    def __call__(self, x):
        TRACES[id(self)] += 1
        return x @ self.w

    @classmethod
    def build(cls, x):
        return x @ x

    @amp
    @classmethod
    def outside(cls, x):
        return x @ x

    @amp
    @staticmethod
    def static(x):
        return x @ x


@pytest.mark.parametrize(
    "call",
    [
        lambda s, x: amp(s.plain)(x),
        lambda s, x: amp(s)(x),
        lambda s, x: amp(functools.partial(s.plain, x))(),
    ],
)
def test_methods_of_plain_objects(call):
    """Methods and callable objects: one trace for each object, and each has its own values."""
    one, two = Scale(_x()), Scale(2 * _x())
    TRACES.clear()
    for _ in range(2):
        np.testing.assert_allclose(call(one, _x()), _x() @ _x(), rtol=5e-2, atol=5e-2)
        np.testing.assert_allclose(call(two, _x()), 2 * _x() @ _x(), rtol=5e-2, atol=5e-2)
    assert {id(one): 1, id(two): 1} == TRACES
    one.w = 3 * _x()
    np.testing.assert_allclose(call(one, _x()), 3 * _x() @ _x(), rtol=5e-2, atol=5e-2)


def test_decorator_forms():
    """With and without arguments, on methods, around classmethods, and from the class."""
    s = Scale(2.0)
    assert isinstance(Scale.decorated, AmpFunction)
    np.testing.assert_array_equal(Scale.decorated(s, _x()), s.decorated(_x()))
    assert Scale.with_policy.policy is PrecisionPolicy.AUTO_MIXED
    assert s.with_policy(_x()).shape == (4, 4)
    for call in (amp(Scale.build), Scale.outside, s.outside, Scale.static, s.static):
        assert _low_dots(call, _x()) == 1
    assert amp()(dense)(_x(), _x()).shape == (4, 4)


def test_methods_of_pytrees_take_self_as_an_argument():
    """The arrays of a registered class are traced, not captured."""

    @jax.tree_util.register_pytree_node_class
    class Dense:
        def __init__(self, w):
            self.w = w

        def tree_flatten(self):
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, _, leaves):
            return cls(*leaves)

        @amp
        def apply(self, x):
            nonlocal traces
            traces += 1
            return x @ self.w

    traces = 0
    for scale in (1.0, 2.0):
        np.testing.assert_allclose(
            Dense(scale * _x()).apply(_x()), scale * _x() @ _x(), rtol=5e-2, atol=5e-2
        )
    assert traces == 1
    assert jax.grad(lambda d: d.apply(_x()).sum())(Dense(_x())).w.shape == (4, 4)


def test_callables_of_other_kinds():
    """jnp functions, jitted ones, custom derivatives, cached and nested amp all work."""

    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda p, t: (jnp.sin(p[0]), jnp.cos(p[0]) * t[0]))
    for fn in (f, jnp.sin, jax.jit(jnp.sin), jax.checkpoint(jnp.sin), amp(jnp.sin)):
        np.testing.assert_allclose(amp(fn)(_x()), jnp.sin(_x()), **LOW)
    assert jax.grad(amp(f))(1.0).dtype == jnp.float32
    assert amp(functools.lru_cache(lambda: jnp.ones(2)))().shape == (2,)


def test_metadata():
    """Name, documentation, module and signature are the function's."""

    def f(x, *, flag: bool = False):
        """Say something."""
        return x

    g = amp(f)
    assert (g.__name__, g.__doc__, g.__module__, g.__wrapped__) == (
        "f",
        "Say something.",
        __name__,
        f,
    )
    assert inspect.signature(g) == inspect.signature(f)
    assert "mixed_bf16" in repr(g)


def test_pickle_and_copy():
    """An amped function is pickled and copied as its function and policy."""
    for again in (pickle.loads(pickle.dumps(amp(dense, "auto_mixed"))), copy.deepcopy(amp(dense))):
        assert again.__wrapped__ is dense
        assert again(_x(), _x()).shape == (4, 4)


# What stays alive.


def _dies(*references: weakref.ref) -> bool:
    gc.collect()
    return all(reference() is None for reference in references)


def test_dropped_function_dies():
    """A function, its amped form, what it captures and what it compiled go together."""

    def make():
        w = _x() * 3

        def f(x):
            return jnp.tanh(x @ w)

        g = amp(f)
        g(_x())
        jax.grad(lambda x: g(x).sum())(_x())
        return weakref.ref(f), weakref.ref(w), weakref.ref(g), weakref.ref(g.runner)

    assert _dies(*make())


def test_dropped_arguments_die():
    """Arrays and constants that were passed to a living function are not kept."""

    def f(x, fn, box):
        return fn(x)

    class Box:
        pass

    def call():
        x, w, box = _x() * 2, _x() * 3, Box()

        def fn(x):
            return x @ w

        amp(f)(x, fn, box)
        return weakref.ref(x), weakref.ref(w), weakref.ref(fn), weakref.ref(box)

    assert _dies(*call())
    runner = amp(f).runner
    assert not runner._forms


def test_returned_constants_are_not_kept():
    """A constant argument that is returned is not kept by the compiled form."""

    class Box:
        pass

    def call():
        box = Box()
        assert amp(_returns)(_x(), box)[1] is box
        return weakref.ref(box)

    assert _dies(call())


def _returns(x, box):
    return x, box


def test_dropped_objects_die():
    """An object whose method was amped dies, and its arrays with it."""

    def call():
        s, number = Scale(_x() * 3), Scale(2.0)
        number.decorated(_x()), amp(s.plain)(_x()), amp(s)(_x())
        return weakref.ref(s), weakref.ref(s.w), weakref.ref(number)

    assert _dies(*call())


def test_objects_without_weak_references():
    """What cannot be referred to weakly works all the same."""

    class Slotted:
        __slots__ = ("w",)

        def __init__(self, w):
            self.w = w

        def __call__(self, x):
            return x @ self.w

    for scale in (1.0, 2.0):
        s = Slotted(_x() * scale)
        np.testing.assert_allclose(amp(s)(_x()), s(_x()), rtol=5e-2, atol=5e-2)


# Errors.


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (3, "needs something to call, and got 3"),
        ("auto_mixed", r"@amp\(policy='auto_mixed'\)"),
        (PrecisionPolicy.MIXED_F16, r"@amp\(policy=mixed_f16\)"),
        (jnp.bfloat16, r"@amp\(policy='bf16'\)"),
        (jnp, r"a function of that file: amp\(jax.numpy.loss\)"),
        (optax.sgd(0.1), r"around the function that uses it"),
        ({"w": jnp.ones((9, 9))}, r"got \{'w': float32\[9,9\]\} of type dict"),
        (Scale, "an object of that class"),
        (property(dense), "put @property above @amp"),
        (functools.cached_property(dense), "put @cached_property above @amp"),
    ],
)
def test_what_cannot_be_called(thing, words):
    """The error says what was given and what to give."""
    for transform in (amp, plan_of):
        with pytest.raises(NotCallableError, match=words):
            transform(thing)


class Trainer:
    """Methods as users decorate them."""

    @amp(policy="auto_mixed")
    def step(self, x):
        """A product."""
        return jnp.tanh(x @ x)

    jitted = jax.jit(step, static_argnums=0)


@pytest.mark.parametrize(
    "fn",
    [
        amp(dense, "auto_mixed"),
        jax.jit(amp(dense, "auto_mixed")),
        jax.jit(jax.jit(amp(dense, "auto_mixed"))),
        functools.partial(amp(dense, "auto_mixed")),
        functools.partial(jax.jit(amp(dense, "auto_mixed"))),
    ],
)
def test_plans_see_what_was_amped(fn):
    """Its own policy counts, whatever is around; another one may be asked for."""
    args = _x(), _x()
    assert str(plan_of(fn)(*args)) == str(plan_of(dense, "auto_mixed")(*args))
    other = "auto_mixed_bf16"
    assert str(plan_of(fn, other)(*args)) == str(plan_of(dense, other)(*args))


@pytest.mark.parametrize("method", [Trainer().step, Trainer().jitted])
def test_plans_see_amped_methods(method):
    """A bound method keeps its object."""
    (first, *_) = plan_of(method)(jnp.ones((4, 4))).decisions()
    assert first.operand is Precision.F16


def test_plans_have_a_short_text():
    """In a console; `print` shows every operation. Both name a policy that was changed."""
    plan = plan_of(jnp.dot, PrecisionPolicy.MIXED_F16.replace(guards=()))(jnp.ones(2), jnp.ones(2))
    assert repr(plan) == "<Plan under mixed_f16*: 1 operations>"
    assert str(plan).startswith("plan under mixed_f16*\n")


def test_wrong_policy_is_found_at_once():
    """A policy is read when amp is applied, not when the function is called."""
    with pytest.raises(PolicyError, match="auto_mixed"):
        amp(dense, "auto_mixd")
    with pytest.raises(PolicyError):
        amp(policy=3)
    with pytest.raises(PolicyError, match=r"^float32\[4\] is not a policy.*report\(fn\)"):
        plan_of(dense, jnp.ones(4))
    with pytest.raises(PolicyError, match="from_json"):
        amp(dense, "mine.json")
    with pytest.raises(NotCallableError, match="The function comes first"):
        amp("auto_mixed", dense)


def test_exceptions_of_the_function():
    """An exception passes through as it is, shows the user's lines only, and leaves nothing."""

    def f(x):
        if broken:
            raise KeyError("mine")
        return x @ x

    broken = True
    for _ in range(2):
        with pytest.raises(KeyError, match="mine") as caught:
            amp(f)(_x())
        files = {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)}
        assert files == {__file__}
    broken = False
    assert amp(f)(_x()).shape == (4, 4)


def test_messages_name_the_users_function_and_argument():
    """JAX's own messages speak of the user's function and parameters."""

    def branch(params, x):
        return x if params["w"].sum() > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"branch at .*params") as caught:
        amp(branch)({"w": _x()}, _x())
    assert "jaxamp" not in str(caught.value).replace(__file__, "")


def _generator(x):
    yield x


async def _coroutine(x):
    return x


def _closure(x):
    y = [x * 2]
    return lambda: y


def _default(x):
    return lambda y=x * 2: y


def _slotted(x):
    class Slotted:
        __slots__ = "w"

    result = Slotted()
    result.w = x * 2
    return result


async def _async_generator(x):
    yield x * 2


UNFINISHED = {
    "a generator": _generator,
    "an async generator": _async_generator,
    "a coroutine": _coroutine,
    "a closure": _closure,
    "a default": _default,
    "a method": lambda x: (x * 2).sum,
    "a partial": lambda x: functools.partial(jnp.add, x * 2),
    "an object": lambda x: Scale(x * 2),
    "an object with slots": _slotted,
    "an object with a list": lambda x: Scale({"w": [x * 2]}),
    "a container that is no tree": lambda x: collections.deque([x * 2]),
}


@pytest.mark.parametrize("kind", UNFINISHED)
def test_results_that_would_outlive_the_trace(kind):
    """What would go on computing after the call is refused, with its line and with advice."""
    fn = UNFINISHED[kind]
    with pytest.raises(OutputError, match=r"Return|register|not async") as caught:
        amp(fn)(_x())
    assert f"{fn.__name__} at {__file__}:{fn.__code__.co_firstlineno}" in str(caught.value)
    assert "generator" not in kind or f"returned {kind}." in str(caught.value)


def test_objects_that_hold_no_result_come_back():
    """What was there before, or holds only numbers, is no part of the trace."""
    w = _x()
    held = Scale(w), functools.partial(jnp.add, w), lambda: w, collections.deque([1.0]), Scale
    assert amp(lambda x: (x * 2, held))(_x())[1] == held


# Plans.


def test_plan_of():
    """The plan of a function, of an amped one, with arrays or their shapes."""
    shapes = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    assert str(plan_of(dense)(_x(), _x())) == str(plan_of(amp(dense))(shapes, shapes))
    amped = amp(dense, "auto_mixed")
    assert str(plan_of(amped)(_x(), _x())) == str(plan_of(dense, "auto_mixed")(_x(), _x()))
    assert str(plan_of(amped, "auto_mixed_bf16")(_x(), _x())) == str(plan_of(dense)(_x(), _x()))
    assert str(plan_of(amped)(_x(), _x())) != str(plan_of(dense)(_x(), _x()))


@pytest.mark.parametrize(("dtype", "parts"), [("complex64", "F32"), ("complex128", "F64")])
def test_products_of_complex_numbers_have_operands(dtype, parts):
    """A decision says in which precision their parts are."""
    with jax.enable_x64(True):
        x = jnp.ones((2, 2), dtype)
        (decision,) = plan_of(jnp.dot)(x, x).decisions()
    assert decision.operand is Precision[parts]


def test_plan_of_a_function_that_needs_a_value():
    """A plan is made of the very trace that a call would run."""
    amped = amp(lambda x, rate: x if rate == 0.0 else x @ x, static_argnums=1)
    assert "bf16" in str(plan_of(amped)(_x(), 1.0))
    with pytest.raises(KeyError, match="mine"):
        plan_of(_raises)(_x())


def _raises(x):
    raise KeyError("mine")


def test_captured_refs():
    """A Ref that the function captures is written to at each call."""
    ref = jax.new_ref(jnp.zeros((4, 4)))

    def add(x):
        ref[...] = ref[...] + x

    f = amp(add)
    f(_x()), f(_x())
    np.testing.assert_array_equal(ref[...], _x() + _x())


def test_integer_gradients():
    """Gradients of type float0 come back from inside."""
    grad = jax.grad(lambda n, x: (n * x).sum(), argnums=(0, 1), allow_int=True)
    by_int, by_float = amp(grad)(jnp.arange(4), _x(4))
    assert by_int.dtype == jax.dtypes.float0
    assert by_float.shape == (4,)


def test_functions_are_applied_to_parts_of_a_product():
    """What the scatter of `apply` holds is hashed where it is bound again."""

    def applied(x):
        return (x @ jnp.eye(4)).at[jnp.array([0, 2])].apply(jnp.sin) @ jnp.eye(4)

    np.testing.assert_allclose(amp(applied)(_x()), applied(_x()), **LOW)


def test_leaves_no_cycles():
    """What a trace has made is freed when it ends, without the collector having to find it."""

    def make(transform):
        def layers(x, w):
            for _ in range(3):
                x = jax.nn.relu(jax.nn.softmax(x @ w) + x)
            x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)
            return (x @ w).sum()

        return transform(layers)

    def garbage(transform):
        gc.collect()
        jax.make_jaxpr(make(transform))(_x(), _x())
        return gc.collect()

    orders = (jax.grad, lambda f: jax.grad(amp(f)), lambda f: amp(jax.grad(f)))
    gc.disable()
    gc.freeze()  # else what other tests have left is walked a dozen times
    try:
        for order in orders:
            garbage(order)  # what is made once for all is no garbage of the program's
        plain, inside, outside = map(garbage, orders)
    finally:
        gc.unfreeze()
        gc.enable()
    assert max(inside, outside) <= plain


def test_collector_rests():
    """The collector is off while a function is traced, and on again even after an error."""

    def product(x, is_allowed):
        assert not gc.isenabled()
        if not is_allowed:
            raise ValueError("refused")
        return x @ x

    fn = amp(product, static_argnames="is_allowed")
    fn(_x(), is_allowed=True)
    with pytest.raises(ValueError, match="refused"):
        fn(_x(), is_allowed=False)
    assert gc.isenabled()


def test_host_memory_of_a_jitted_function():
    """Results are where those of the function are: called, exported, and in another ``jax.jit``."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    host = NamedSharding(mesh, PartitionSpec("x"), memory_kind="pinned_host")
    plain = jax.jit(lambda x, w: (jnp.tanh(x @ w), x), out_shardings=(host, None))
    args = jnp.ones((16, 8)), jnp.ones((8, 8))

    def places(fn):
        exported = jax.export.export(fn)(*args)
        arrays = *fn(*args), *fn(x=args[0], w=args[1]), *jax.jit(fn)(*args)
        kinds = [array.sharding.memory_kind for array in arrays]
        return kinds, [aval.memory_space for aval in exported.out_avals]

    assert places(amp(plain)) == places(plain)
    assert places(plain)[0][0] == "pinned_host"
