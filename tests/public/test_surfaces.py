"""Each surface of JAX and of Python that a program of `amp` meets, as its users would try it."""

from __future__ import annotations

import functools
import inspect
import pickle
import re
import threading
import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import jaxamp
from jaxamp import PrecisionPolicy, amp, training

W = jax.random.normal(jax.random.key(0), (8, 8)) / 4
X = jax.random.normal(jax.random.key(1), (4, 8))
LATER = [pytest.param(word, marks=pytest.mark.long) for word in ("mixed_f16", "fp8_current")]
LOW = {"rtol": 5e-2, "atol": 5e-2}


def loss_fn(w, x):
    """A product, a softmax and a mean, in scopes."""
    with jax.named_scope("body"):
        hidden = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return -jnp.mean(jax.nn.log_softmax(hidden @ w)[:, 0])


def step(w, x):
    """A whole step, in float32."""
    loss, grads = jax.value_and_grad(loss_fn)(w, x)
    return w - 0.1 * grads, loss


def rounds(fn, *args):
    """Whether matrix products of a call are narrow."""
    return "bf16" in str(jax.make_jaxpr(fn)(*args))


def test_decorators():
    """Every order and form in which people write one."""

    @amp
    def bare(w, x):
        return x @ w

    @amp(policy="bf16")
    def called(w, x):
        return x @ w

    @functools.partial(amp, policy="bf16")
    def partly(w, x):
        return x @ w

    @jax.jit
    @amp
    def under_jit(w, x):
        return x @ w

    @amp
    @jax.jit
    def over_jit(w, x):
        return x @ w

    @amp
    @functools.partial(jax.jit, static_argnames="scale")
    def with_option(w, x, scale=2):
        """Doc."""
        return x @ w * scale

    for fn in (bare, called, partly, under_jit, over_jit, with_option):
        assert rounds(fn, W, X)
    assert with_option.__doc__ == "Doc."
    assert list(inspect.signature(with_option).parameters) == ["w", "x", "scale"]
    np.testing.assert_array_equal(with_option(W, X, scale=4), 4 * bare(W, X))


def test_methods():
    """Methods of plain classes, dataclasses and subclasses; static and class methods."""

    class Net:
        scale = 2.0

        @amp
        def plain(self, w, x):
            return x @ w * self.scale

        @staticmethod
        @amp
        def static(w, x):
            return x @ w

        @classmethod
        @amp
        def of_class(cls, w, x):
            return x @ w * cls.scale

    class Child(Net):
        def plain(self, w, x):
            return super().plain(w, x) + 1

    @jax.tree_util.register_dataclass
    @dataclass
    class Layer:
        w: jax.Array

        @amp
        def __call__(self, x):
            return x @ self.w

    exact = X @ W
    np.testing.assert_allclose(Net().plain(W, X), 2 * exact, **LOW)
    np.testing.assert_allclose(Child().plain(W, X), 2 * exact + 1, **LOW)
    np.testing.assert_allclose(Net.static(W, X), exact, **LOW)
    np.testing.assert_allclose(Net.of_class(W, X), 2 * exact, **LOW)
    np.testing.assert_allclose(Layer(W)(X), exact, **LOW)
    np.testing.assert_allclose(amp(Layer(W).__call__)(X), exact, **LOW)


def test_partials():
    """Of arrays, of words, of an amped function and of a method."""

    def fn(w, x, *, how="plain"):
        return x @ w if how == "plain" else x @ w.T

    class Net:
        def call(self, w, x, how):
            return fn(w, x, how=how)

        other = functools.partialmethod(amp(call), how="other")

    for made in (
        amp(functools.partial(fn, W)),
        functools.partial(amp(fn), W),
        jax.tree_util.Partial(amp(fn), W),
        amp(jax.tree_util.Partial(fn, W)),
    ):
        np.testing.assert_allclose(made(X), X @ W, **LOW)
        assert rounds(made, X)
    amp(fn)(W, X)  # has a compiled form, which has no place for what is bound
    assert amp(functools.partial(fn, W))(X).shape == X.shape
    default = amp(lambda x, w=W: x @ w)
    np.testing.assert_allclose(default(X), X @ W, **LOW)
    bound = amp(functools.partial(default.__wrapped__, w=2 * W))
    np.testing.assert_allclose(bound(X), 2 * X @ W, **LOW)
    np.testing.assert_allclose(amp(functools.partial(fn, how="other"))(W, X), X @ W.T, **LOW)
    np.testing.assert_allclose(Net().other(W, X), X @ W.T, **LOW)


def test_static_arguments():
    """Words, ints, functions and tuples choose the program, with and without declarations."""

    def fn(w, x, activation, times, names=("a",)):
        for _ in range(times):
            x = activation(x @ w)
        return dict.fromkeys(names, x)

    plain = amp(fn)(W, X, jnp.tanh, 2)
    declared = amp(fn, static_argnums=(2, 3), static_argnames="names")
    for out in (
        declared(W, X, jnp.tanh, 2),
        jax.jit(amp(fn), static_argnums=(2, 3))(W, X, jnp.tanh, 2),
        amp(jax.jit(fn, static_argnums=(2, 3)))(W, X, jnp.tanh, 2),
    ):
        np.testing.assert_array_equal(out["a"], plain["a"])
    assert set(declared(W, X, jnp.tanh, 1, names=("b", "c"))) == {"b", "c"}


def test_x64():
    """Of 64 bits nothing is rounded; float32 beside it is."""
    with jax.enable_x64(True):
        wide, narrow = jnp.asarray(np.float64(W)), jnp.asarray(np.float32(W))
        x = jnp.asarray(np.float64(X))
        np.testing.assert_array_equal(amp(loss_fn)(wide, x), loss_fn(wide, x))
        out = amp(lambda a, b, x: ((x @ a).sum(), b @ b))(wide, narrow, x)
        assert [leaf.dtype for leaf in out] == [jnp.float64, jnp.float32]
        assert rounds(lambda b: amp(lambda b: b @ b)(b), narrow)
        assert amp(lambda n: n + 1)(2**40) == 2**40 + 1


@pytest.mark.parametrize("policy", ["mixed_bf16", *LATER])
def test_strict_promotion(policy):
    """Being rewritten promotes nothing, and neither do reports and optimizers."""
    with jax.numpy_dtype_promotion("strict"), warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxamp.errors.IdlePolicyWarning)
        inner, outer = jax.grad(amp(loss_fn, policy)), amp(jax.grad(loss_fn), policy)
        for fn in (amp(step, policy), inner, outer):
            jax.block_until_ready(fn(W, X))
        gradient = training.scaled_value_and_grad(
            loss_fn, policy=policy, loss_scale=training.DynamicLossScale(), clip_norm=1.0
        )
        (_, grads), finite, _ = gradient(W, X)
        for wrap in (training.with_loss_scale, training.skip_nonfinite, training.with_kahan,
                     training.with_master_weights, training.with_stochastic_rounding):  # fmt: skip
            optimizer = wrap(optax.sgd(1e-3))  # optax.adam promotes
            optimizer.update(grads, optimizer.init(W), W)
        assert finite
        str(jaxamp.report(step, policy)(W, X))
        str(jaxamp.probe(step, policy)(W, X))
        str(jaxamp.explain(step, policy)(W, X))


def test_debug_nans():
    """A NaN of the program is raised where it is made; masks and skipped steps raise nothing."""
    with jax.debug_nans(True):
        masked = amp(lambda w, x: jax.nn.softmax(jnp.where(x > 0, x @ w, -jnp.inf)), "mixed_f16")
        masked(W, jnp.abs(X) + 1)
        with pytest.raises(FloatingPointError) as raised:
            amp(lambda w, x: jnp.log(-jnp.abs(x @ w)).sum())(W, X)
        assert "nan" in str(raised.value)


def test_debug_infs():
    """An overflow of float16 that float32 has not is raised too."""
    with jax.debug_infs(True):
        amp(loss_fn, "mixed_f16")(W, X)
        with pytest.raises(FloatingPointError):
            amp(lambda w, x: x @ w, "always_f16")(jnp.abs(W) * 1e3, jnp.abs(X) * 1e3)


def test_disable_jit_runs_one_operation_at_a_time():
    """Nothing is compiled as a whole, and callbacks show numbers."""
    seen = []

    def fn(w, x):
        hidden = x @ w
        jax.debug.callback(lambda h: seen.append(np.asarray(h)), hidden)
        return jax.nn.softmax(hidden) @ w

    with jax.disable_jit(), pytest.warns(UserWarning, match="one operation at a time"):
        out = amp(fn)(W, X)
    jax.effects_barrier()
    np.testing.assert_allclose(out, fn(W, X), **LOW)
    np.testing.assert_allclose(seen[0], X @ W, **LOW)


def test_disable_jit_says_what_the_function_sees():
    """Python prints and breakpoints meet tracers: the call says so, and what to do."""
    with jax.disable_jit(), pytest.warns(UserWarning, match="jax.debug.print") as found:
        amp(loss_fn)(W, X)
    assert [warning.filename for warning in found] == [__file__]
    values = []

    def printing(w, x):
        values.append(float(jnp.sum(x @ w)))
        return x @ w

    with jax.disable_jit():
        amp(printing, "always_f32")(W, X)
    assert values == [float(jnp.sum(X @ W))]


def test_checkify():
    """Checks of the program and those of floats work around and inside."""

    def fn(w, x):
        y = x @ w
        checkify.check(jnp.all(y < 1e3), "too large: {top}", top=y.max())
        return jnp.log(y).sum()

    checks = checkify.user_checks | checkify.float_checks
    checked = checkify.checkify(amp(fn), errors=checks)
    assert "too large" in checked(W * 1e4, X)[0].get()
    assert "nan generated by primitive: log" in checked(W, X)[0].get()
    assert "log" in jax.jit(checked)(W, X)[0].get()
    inside = amp(checkify.checkify(fn, errors=checks))
    assert "nan generated by primitive: log" in inside(W, X)[0].get()


@pytest.mark.parametrize("policy", ["mixed_bf16", "mixed_f16"])
def test_donation(policy):
    """What is donated is reused, and no warning says that it was not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w = jnp.array(W)
        new, _ = jax.jit(amp(step, policy), donate_argnums=0)(w, X)
        assert w.is_deleted()
        kept = amp(jax.jit(step, donate_argnums=0), policy)(new, X)
        jax.block_until_ready(kept)


@pytest.mark.parametrize("make", [
    lambda: jaxamp.report(step)(W, X),
    lambda: jaxamp.explain(step)(W, X),
    lambda: jaxamp.diff("mixed_bf16", "mixed_f16")(step)(W, X),
    lambda: jaxamp.probe(step)(W, X),
    lambda: jaxamp.tune(loss_fn, (W, X), budget=1e-2),
], ids=["report", "explain", "diff", "probe", "tune"])  # fmt: skip
def test_a_notebook_shows(make):
    """Each result as a page of its own, twice in one notebook, and as text where there is none."""
    value = make()
    html = value._repr_html_()
    assert "<" in html
    assert len(html) > 200
    assert not re.search(r"""(src|href)=["']https?://""", html)
    assert len(str(value)) > 20
    assert "object at 0x" not in repr(value)


@pytest.mark.parametrize("order", ["grad(amp)", "amp(grad)"])
def test_names_in_profiles(order):
    """Kernels carry the scopes of the program and the name of the function, in both orders."""
    fn = jax.grad(amp(loss_fn)) if order == "grad(amp)" else amp(jax.grad(loss_fn))
    text = jax.jit(fn).lower(W, X).compile().as_text()
    names = set(re.findall(r'op_name="([^"]*)"', text))
    dots = [name for name in names if "dot_general" in name]
    for scope in ("body", "head"):
        assert any(scope in name for name in dots), names
        assert any(scope in name and "transpose" in name for name in names), names
    assert amp(loss_fn).lower(W, X).as_text().count("loss_fn")


@pytest.mark.long
def test_orbax_round_trips_of_scale_states(tmp_path):
    """A loss scale, an optimizer's state and a history of FP8 come back as they were."""
    ocp = pytest.importorskip("orbax.checkpoint")
    policy = PrecisionPolicy.FP8_DELAYED.replace(scaling={"small": (), "history": 4})
    fp8 = amp(lambda w, x: (w - 0.1 * jax.grad(lambda w: jnp.sum(x @ w @ w))(w), 0.0), policy)
    w, x = jnp.eye(32), jnp.ones((32, 32))
    history = fp8.init(w, x)
    (w, _), history = fp8(history, w, x)
    optimizer = training.with_loss_scale(training.with_master_weights(optax.adam(1e-3)))
    low = w.astype(jnp.bfloat16)
    kept = {"history": history, "scale": training.DynamicLossScale(), "state": optimizer.init(low)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", kept)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, kept)
        for template in (kept, abstract):
            back = checkpointer.restore(tmp_path / "step", template)
            assert jax.tree.structure(back) == jax.tree.structure(kept)
            for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(kept), strict=True):
                np.testing.assert_array_equal(np.float32(a), np.float32(b))
    fp8(back["history"], w, x)
    back["scale"].scale(jnp.float32(1))


@pytest.mark.long
def test_derivatives_and_stages():
    """What JAX does with a function it does with this one."""
    fn = amp(loss_fn)
    exact = jax.grad(loss_fn)(W, X)
    np.testing.assert_allclose(jax.vjp(fn, W, X)[1](1.0)[0], exact, **LOW)
    _, linear = jax.linearize(lambda w: fn(w, X), W)
    np.testing.assert_allclose(linear(W), jnp.vdot(exact, W), **LOW)
    np.testing.assert_allclose(jax.jacfwd(fn)(W, X), exact, **LOW)
    assert jax.hessian(lambda w: fn(w, X))(W).shape == (8, 8, 8, 8)
    assert jax.eval_shape(fn, W, X).shape == ()
    np.testing.assert_array_equal(fn.lower(W, X).compile()(W, X), fn(W, X))
    exported = jax.export.export(jax.jit(fn))(W, X)
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(W, X), fn(W, X))


def test_threads_share_a_function():
    """Eight threads that call it first get the same numbers."""
    fn, results = amp(lambda w, x: jnp.tanh(x @ w) @ w), []
    threads = [threading.Thread(target=lambda: results.append(fn(W, X))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert len({np.asarray(r).tobytes() for r in results}) == 1


def test_settings_of_jax_around_a_call():
    """The default precision of products, checks, leaks and logs do not break a call."""
    with jax.default_matmul_precision("highest"), warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxamp.errors.IdlePolicyWarning)
        assert jnp.isfinite(amp(loss_fn)(W, X))
    with jax.enable_checks(True), jax.checking_leaks():
        jax.block_until_ready(amp(step)(W, X))
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(amp(step)(W, X))
    with jax.numpy_rank_promotion("raise"):
        jax.block_until_ready(amp(step)(W, X))


def test_pickles():
    """A policy, an amped function of a module, a report."""
    policy = PrecisionPolicy.MIXED_BF16
    assert pickle.loads(pickle.dumps(policy)) == policy
    again = pickle.loads(pickle.dumps(amp(loss_fn)))
    np.testing.assert_array_equal(again(W, X), amp(loss_fn)(W, X))
    report = jaxamp.report(step)(W, X)
    assert str(pickle.loads(pickle.dumps(report))) == str(report)
