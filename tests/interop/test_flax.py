"""flax: nnx objects keep their state under amp, linen models go through their apply."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError

import jaxamp
from jaxamp import amp, plan_of, training
from jaxamp.errors import NotCallableError, TrainingError

LOW = {"rtol": 3e-2, "atol": 3e-2}


def _x(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape or (8, 4))


class Net(nnx.Module):
    """A module with parameters, statistics, random streams, a counter and a plain attribute."""

    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.drop(self.norm(self.dense(x)))

    def encode(self, x):
        return self.dense(x)


def _net() -> Net:
    return Net(nnx.Rngs(0))


def _loss(model, x):
    return jnp.mean(model(x) ** 2)


def _assert_same_state(a, b) -> None:
    left, right = nnx.state(a), nnx.state(b)
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, two in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, two = jax.random.key_data(one), jax.random.key_data(two)
        assert one.dtype == two.dtype
        np.testing.assert_allclose(one, two, **LOW)


def test_call_updates_the_state():
    """Statistics, random counters and variables change as they do without amp."""
    model, expected = _net(), _net()
    amped = amp(model)
    for _ in range(3):
        np.testing.assert_allclose(amped(_x()), expected(_x()), **LOW)
    _assert_same_state(model, expected)
    _assert_same_state(amped, expected)
    assert int(amped.calls[...]) == 3
    assert int(model.drop.rngs.count[...]) == 3


def test_traces_once():
    """Calls whose state and parameters change trace once."""
    traces = []

    class Counting(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.eye(4))
            self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            traces.append(1)
            return self.norm(x @ self.w)

    model = Counting()
    for _ in range(3):
        amp(model)(_x())
        model.w[...] += 1.0
    assert len(traces) == 1


def test_is_the_same_object_seen_otherwise():
    """Type, attributes, paths and later changes are shared with the module."""
    model = _net()
    amped = amp(model)
    assert isinstance(amped, Net)
    assert amped.dense is model.dense
    amped.extra = 3
    assert model.extra == 3
    amped.eval()
    assert model.drop.deterministic
    np.testing.assert_allclose(amped(_x()), model(_x()), **LOW)
    assert jax.tree.structure(nnx.state(amped)) == jax.tree.structure(nnx.state(model))
    assert amped.encode(_x()).shape == (8, 4)


def test_computes_low():
    """Calls and methods compute in low precision; the module itself does not."""
    model = _net()
    graph, state = nnx.split(model)

    def jaxpr(transform, method):
        return str(
            jax.make_jaxpr(lambda s, x: getattr(transform(nnx.merge(graph, s)), method)(x))(
                state, _x()
            )
        )

    for method in ("__call__", "encode"):
        assert "bf16" in jaxpr(amp, method)
        assert "bf16" not in jaxpr(lambda m: m, method)
        assert "bf16" not in jaxpr(lambda m: amp(m, "always_f32"), method)


def test_under_nnx_jit_and_grad():
    """nnx.jit and nnx.grad take the amped module, and the gradients fit the module's optimizer."""
    model, expected = _net(), _net()
    amped = amp(model)
    np.testing.assert_allclose(
        nnx.jit(lambda m, x: m(x))(amped, _x()), nnx.jit(lambda m, x: m(x))(expected, _x()), **LOW
    )
    _assert_same_state(model, expected)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    grads = nnx.grad(_loss)(amped, _x())
    want = nnx.grad(_loss)(expected, _x())
    _assert_same_state(model, expected)
    assert jax.tree.structure(grads) == jax.tree.structure(want)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    optimizer.update(model, grads)
    assert int(optimizer.step[...]) == 1


def test_functions_of_modules():
    """A function that takes nnx objects updates them, under nnx transforms too."""
    model, expected = _net(), _net()
    loss = amp(_loss)
    np.testing.assert_allclose(loss(model, _x()), _loss(expected, _x()), **LOW)
    np.testing.assert_allclose(nnx.jit(loss)(model, x=_x()), _loss(expected, _x()), **LOW)
    nnx.grad(loss)(model, _x()), nnx.grad(_loss)(expected, _x())
    _assert_same_state(model, expected)


def test_whole_train_step():
    """Model, optimizer and metrics of a decorated step are updated, and it trains."""
    model, traces = _net(), []
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    metric = nnx.metrics.Average()

    @amp
    def step(model, optimizer, metric, x):
        traces.append(1)
        loss, grads = nnx.value_and_grad(_loss)(model, x)
        optimizer.update(model, grads)
        metric.update(values=loss)
        return loss

    losses = [float(step(model, optimizer, metric, _x())) for _ in range(20)]
    assert len(traces) == 1
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert int(optimizer.step[...]) == int(model.calls[...]) == 20
    np.testing.assert_allclose(metric.compute(), np.mean(losses), rtol=1e-5)
    assert model.dense.kernel[...].dtype == jnp.float32
    assert jax.tree.leaves(optimizer.opt_state)[1].dtype == jnp.float32


def test_structure_may_change():
    """New attributes, new modules and returned modules come out; aliases stay aliases."""
    model = _net()

    @amp
    def grow(model, again, rngs, x):
        assert model is again
        model.seen = nnx.Intermediate(x.sum())
        return nnx.Linear(4, 2, rngs=rngs), model, x.shape

    rngs = nnx.Rngs(5)
    new, same, shape = grow(model, model, rngs, _x())
    assert new(_x()).shape == (8, 2)
    assert same is model
    assert shape == (8, 4)
    assert int(rngs.default.count[...]) > 0
    np.testing.assert_allclose(model.seen[...], _x().sum(), **LOW)


def test_decorated_methods():
    """@amp on a module's method, its other arguments and its constants."""

    class Decorated(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.eye(4))
            self.count = nnx.Variable(jnp.array(0))

        @amp
        def __call__(self, x, *, train=False, scale=1.0):
            self.count[...] += 1
            return x @ self.w * (scale if train else 0)

    model = Decorated()
    np.testing.assert_allclose(model(_x(), train=True, scale=2.0), 2 * _x(), **LOW)
    assert not model(_x()).any()
    assert int(model.count[...]) == 2
    nnx.jit(lambda m, x: m(x))(model, _x())
    assert int(model.count[...]) == 3


def test_split_and_merge_by_hand():
    """The functional style works; a state that the plain function would change is changed."""
    graph, state = nnx.split(_net())

    def apply(state, x):
        model = nnx.merge(graph, state)
        return model(x), nnx.state(model)

    want, expected = jax.jit(apply)(state, _x())  # a copy of the state
    np.testing.assert_allclose(jax.jit(amp(apply))(state, _x())[0], want, **LOW)
    assert int(state["calls"][...]) == 0
    out, new = amp(apply)(state, _x())
    np.testing.assert_allclose(out, want, **LOW)
    assert jax.tree.structure(new) == jax.tree.structure(expected)
    assert int(state["calls"][...]) == 1


def test_nnx_vmap_and_scan():
    """Layers mapped over and scanned over by nnx are amped as they are called."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0)
    def make(rngs):
        return nnx.Linear(4, 4, rngs=rngs)

    layers = make(nnx.Rngs(0))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
        return amp(layer)(x)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def plain(x, layer):
        return layer(x)

    want = plain(_x(), layers)
    np.testing.assert_allclose(forward(_x(), layers), want, rtol=0.1, atol=0.1)
    np.testing.assert_allclose(amp(plain)(_x(), layers), want, rtol=0.1, atol=0.1)


def test_errors_leave_the_module_alone():
    """An exception in a call passes through and changes nothing."""

    @amp
    def broken(model, x):
        model(x)
        raise KeyError("mine")

    model = _net()
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            broken(model, _x())
    _assert_same_state(model, _net())
    assert amp(model)(_x()).shape == (8, 4)


TRANSFORMS = {
    "jit": jax.jit,
    "vmap": jax.vmap,
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x)[1],
    "eval_shape": lambda f: lambda x: jnp.zeros(jax.eval_shape(f, x).shape),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_modules_of_an_outer_trace_are_read(name: str):
    """JAX's transforms take what closes over a module, as they do without amp."""
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    transform = TRANSFORMS[name]
    want = transform(model)(_x())
    for amped in (amp(model), lambda x: amp(lambda m, x: m(x))(model, x)):
        np.testing.assert_allclose(transform(amped)(_x()), want, **LOW)
        np.testing.assert_allclose(amped(_x()), model(_x()), **LOW)


@pytest.mark.parametrize("change", ["state", "structure", "result"])
def test_modules_of_an_outer_trace_are_not_written(change: str):
    """They cannot be; nothing is half-updated."""

    def function(model: Net, x: jax.Array) -> object:
        if change == "state":
            return model(x)
        if change == "structure":
            model.seen = nnx.Intermediate(x.sum())
            return x
        return model.dense

    model = _net()
    with pytest.raises(
        TraceContextError, match=r"function updates or returns nnx objects.*nnx\.jit"
    ):
        jax.jit(lambda x: jax.tree.leaves(amp(function)(model, x)))(_x())
    _assert_same_state(model, _net())
    assert amp(model)(_x()).shape == (8, 4)


class Remat(nnx.Module):
    """A checkpointed layer, the parameters of which nnx writes anew, beside drawn numbers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense, self.drop = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(nnx.remat(lambda dense, x: dense(x))(self.dense, x))


@pytest.mark.parametrize("is_merged", [False, True])
def test_variables_of_this_trace_are_written_beside_others(is_merged: bool):
    """JAX's gradient by parameters leaves other variables to the trace around it."""
    graph, params, rest = nnx.split(Remat(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: nnx.State, rest: nnx.State, x: jax.Array) -> jax.Array:
        if is_merged:
            return amp(lambda model, x: model(x).sum())(nnx.merge(graph, params, rest), x)
        return amp(lambda *trees: nnx.merge(graph, *trees)(x).sum())(params, rest)

    want = jax.grad(lambda p: nnx.merge(graph, p, rest)(_x()).sum())(params)
    for derivative in (jax.grad(loss), jax.jit(jax.grad(loss))):
        got = derivative(params, rest, _x())
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **LOW), got, want)
        assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(rest))


TOOLS = {
    "plan_of": plan_of,
    "report": jaxamp.report,
    "explain": jaxamp.explain,
    "probe": jaxamp.probe,
}


@pytest.mark.parametrize("name", TOOLS)
def test_tools_take_modules(name: str):
    """They show the module's products, and leave its state alone."""
    model = _net()
    for told in (TOOLS[name](model)(_x()), TOOLS[name](lambda m, x: m(x))(model, _x())):
        assert "bf16" in str(told) or "dot_general" in str(told)
    _assert_same_state(model, _net())


def test_dropped_module_dies():
    """A module and its layers go when they are dropped."""

    def call():
        model = _net()
        amp(model)(_x()), amp(_loss)(model, _x()), nnx.grad(amp(_loss))(model, _x())
        return weakref.ref(model), weakref.ref(model.dense)

    references = call()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_plan_of_nnx():
    """The plan of a module's call, and of a function that takes one."""
    assert "bf16" in str(plan_of(_net())(_x()))
    assert str(plan_of(amp(_net(), "auto_mixed"))(_x())) == str(plan_of(_net(), "auto_mixed")(_x()))
    model = _net()
    assert "bf16" in str(plan_of(_loss)(model, jax.ShapeDtypeStruct((8, 4), jnp.float32)))
    _assert_same_state(model, _net())

    class Opaque(nnx.Module, pytree=False):
        def __init__(self):
            self.w, self.count = nnx.Param(jnp.eye(4)), nnx.Variable(jnp.array(0))

        def __call__(self, x):
            self.count[...] += 1
            return x @ self.w @ self.w

    opaque = Opaque()
    assert "bf16" in str(plan_of(opaque)(_x()))
    assert int(opaque.count[...]) == 0
    np.testing.assert_allclose(amp(opaque)(_x()), _x(), **LOW)
    assert int(opaque.count[...]) == 1


@pytest.mark.parametrize(
    "take",
    [
        training.scaled_grad,
        training.scaled_value_and_grad,
        training.scaled_filter_grad,
        training.scaled_filter_value_and_grad,
    ],
)
def test_gradients_that_would_lose_state_are_refused(take):
    """A module anywhere among the arguments; its state as a tree is as good as any other tree."""
    model, x = _net(), _x()
    for loss, args in (
        (_loss, (model, x)),
        (lambda w, parts: jnp.sum(w * parts["model"](x)), (jnp.ones(4), {"model": model})),
        (lambda w, rngs: jnp.sum(w * rngs.normal((4,))), (jnp.ones(4), nnx.Rngs(0))),
    ):
        told = r"nnx\.value_and_grad.*jaxamp\.training\.with_loss_scale"
        with pytest.raises(TrainingError, match=told):
            take(loss)(*args)
    graph, params = nnx.split(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
    grads = take(lambda params, x: _loss(nnx.merge(graph, params), x))(params, x)
    assert bool(grads.grads_finite)


class Linen(nn.Module):
    """A linen model with statistics and dropout."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


def test_linen():
    """A linen model's apply: parameters, mutable collections, rngs, grad, jit."""
    model = Linen()
    variables = model.init(jax.random.key(0), _x())
    apply = amp(model.apply)
    np.testing.assert_allclose(apply(variables, _x()), model.apply(variables, _x()), **LOW)
    options = {"train": True, "mutable": ["batch_stats"], "rngs": {"dropout": jax.random.key(2)}}
    got, state = apply(variables, _x(), **options)
    want, expected = model.apply(variables, _x(), **options)
    np.testing.assert_allclose(got, want, **LOW)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    grads = jax.grad(lambda v: jax.jit(apply)(v, _x()).sum())(variables)
    assert jax.tree.structure(grads) == jax.tree.structure(variables)
    assert "bf16" in str(jax.make_jaxpr(apply)(variables, _x()))


@pytest.mark.parametrize("method", ["init", "apply"])
def test_a_linen_module_is_wrapped_by_its_method(method):
    """A linen module is not called as it is; what amp makes of it says what to wrap."""
    with pytest.raises(AttributeError, match=rf"call of a Linen.*amp\(net\.{method}\)"):
        getattr(amp(Linen()), method)
    assert not hasattr(amp(Linen().apply), "init")


@pytest.mark.parametrize("call", [amp, jaxamp.report, plan_of])
@pytest.mark.parametrize("module", [Linen(), nn.Dense(3), nn.Sequential([nn.Dense(3)])])
def test_a_linen_module_without_parameters_says_what_to_wrap(call, module):
    """Calling it is an error of flax's about compact methods; ours names the function to give."""
    with pytest.raises(NotCallableError, match=r"amp\(net\.apply\)\(variables, x\)"):
        call(module)(_x())


def test_a_linen_module_without_parameters_may_not_need_them():
    """A module that only calls functions runs as it is."""

    class Sine(nn.Module):
        def __call__(self, x):
            return jnp.sin(x)

    np.testing.assert_array_equal(amp(Sine())(_x()), jnp.sin(_x()))


def test_linen_traces_once_and_dies():
    """A linen model is traced once for its lifetime, and not kept beyond it."""
    traces = []

    class Counting(nn.Module):
        @nn.compact
        def __call__(self, x):
            traces.append(1)
            return nn.Dense(2)(x)

    model = Counting()
    variables = model.init(jax.random.key(0), _x())
    traces.clear()
    for _ in range(3):
        amp(model.apply)(variables, _x())
    assert len(traces) == 1
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_state_of_a_bound_module_names_apply():
    """Statistics that a call leaves in a linen module outside cannot be left there by a trace."""

    class Counting(nn.Module):
        @nn.compact
        def __call__(self, x):
            count = self.variable("stats", "count", lambda: jnp.zeros(()))
            count.value = count.value + x.mean()
            return nn.Dense(2)(x)

    model = Counting()
    bound = model.bind(model.init(jax.random.key(0), _x()), mutable=["stats"])
    amp(lambda x: bound(x))(_x())
    with pytest.raises(
        jax.errors.UnexpectedTracerError, match=r"(?s)traced for amp\..*network's apply"
    ):
        jnp.sin(bound.variables["stats"]["count"])


def test_flax_is_imported_only_by_the_user():
    """Using amp, equinox included, imports no flax."""
    program = (
        "import sys, jax.numpy as jnp, equinox, jaxamp\n"
        "jaxamp.amp(jnp.sin)(1.0)\n"
        "sys.exit(any(name.split('.')[0] == 'flax' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
