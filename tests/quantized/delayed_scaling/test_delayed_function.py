"""Delayed scaling: the magnitudes of earlier steps go in, and come out with one more."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxamp import PrecisionPolicy, amp, plan_of, serve
from jaxamp.errors import PolicyError, RewriteError, TrainingError
from jaxamp.run.settings import overriding
from jaxamp.training import scaled_filter_grad, scaled_value_and_grad
from tests.quantized.lowp.models import mlp, mlp_inputs, mlp_loss, policy, worst

DELAYED = policy("fp8_delayed", history=4)
CURRENT = policy("fp8_current")
SQUARES = jnp.eye(16), jnp.ones((16, 16))


def sgd(params, x, target):
    """A whole step: gradient and update."""
    loss, grads = jax.value_and_grad(mlp_loss)(params, x, target)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def layered(params, x, target):
    """A gradient through a loop over rematerialised layers."""

    def loss(params):
        y, _ = jax.lax.scan(jax.checkpoint(lambda x, p: (x + mlp(p, x), None)), x, params)
        return jnp.mean((y - target) ** 2)

    return jax.grad(loss)(params)


def test_the_first_step_is_that_of_current_scaling():
    """The history that `init` makes holds the magnitudes of these very arguments."""
    args = mlp_inputs(32, 32, 48)
    step = amp(sgd, DELAYED)
    history = step.init(*args)
    # Seven dots of eight tensors: input, three weights, what `down` reads, three cotangents.
    assert {a.shape for a in jax.tree.leaves(history)} == {(4, 8)}
    (params, loss), after = step(history, *args)
    want_params, want_loss = amp(sgd, CURRENT)(*args)
    assert worst([want_params, want_loss], [params, loss]) > 60
    for old, new in zip(jax.tree.leaves(history), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(new[0], old[0], rtol=1e-2)
        np.testing.assert_array_equal(new[1:], old[:-1])


def test_scales_are_those_of_the_largest_magnitude_kept():
    """What is larger than in the steps before is clipped, and only until its step is known."""
    dot = amp(jnp.dot, DELAYED)
    x, w = jnp.ones((16, 16)), jnp.eye(16)
    history = dot.init(x, w)
    first, history = dot(history, 1000 * x, w)
    np.testing.assert_array_equal(first, 448 * 2**-8)
    second, history = dot(history, 1000 * x, w)
    np.testing.assert_allclose(second, 1000, rtol=2**-4)
    for _ in range(4):
        third, history = dot(history, x, w)
    np.testing.assert_allclose(third, 1, rtol=2**-4)


@pytest.mark.long
def test_a_step_that_is_not_measured():
    """It has the scales of the history, also in loops, and leaves it alone."""
    args = mlp_inputs(32, 32, 48)
    step = amp(sgd, DELAYED)
    history = step.init(*args)
    want, after = step(history, *args)
    for unmeasured in (step.unmeasured, jax.jit(step.unmeasured)):
        got, same = unmeasured(history, *args)
        assert worst(want, got) > 60
        jax.tree.map(np.testing.assert_array_equal, same, history)
    dot = amp(jnp.dot, DELAYED)
    ones = dot.init(jnp.ones((16, 16)), jnp.eye(16))
    clipped, _ = dot.unmeasured(ones, 1000 * jnp.ones((16, 16)), jnp.eye(16))
    np.testing.assert_array_equal(clipped, 448 * 2**-8)
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), mlp_inputs(16, 16, 16)[0])
    _, x, target = mlp_inputs(16, 16, 16)
    layers = amp(layered, DELAYED.replace(scaling={"ends": True}))
    before = layers.init(stacked, x, target)
    want, _ = layers(before, stacked, x, target)
    assert worst(want, layers.unmeasured(before, stacked, x, target)[0]) > 60
    with pytest.raises(TrainingError, match="not this step's"):
        layers.unmeasured(after, stacked, x, target)
    with pytest.raises(TrainingError, match="history first"):
        dot.unmeasured(jnp.ones((16, 16)), jnp.eye(16))


def test_nonfinite_values_are_seen_and_not_remembered():
    """An infinity makes the step NaN, and leaves the scales of later steps alone."""
    dot = amp(jnp.dot, DELAYED)
    x, w = jnp.ones((16, 16)), jnp.eye(16)
    history = dot.init(x, w)
    out, history = dot(history, x.at[0, 0].set(jnp.inf), w)
    assert np.isnan(out[0]).all()
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(history))
    np.testing.assert_array_equal(dot(history, x, w)[0], 1)


def test_loops_keep_a_history_for_each_turn():
    """A scan over layers, recomputed in the backward pass, has a row for each layer."""
    params, x, target = mlp_inputs(16, 16, 16)
    stacked = jax.tree.map(lambda a: jnp.stack([a, 4 * a, a]), params)
    whole = {"ends": True}
    step = amp(layered, DELAYED.replace(scaling=whole))
    history = step.init(stacked, x, target)
    assert {a.shape for a in jax.tree.leaves(history)} == {(3, 4, 5), (3, 4, 8)}
    grads, history = jax.jit(step)(history, stacked, x, target)
    want = amp(layered, CURRENT.replace(scaling=whole))(stacked, x, target)
    assert worst(want, grads) > 15


def test_training_and_a_checkpoint():
    """The history is a pytree of arrays: put away and taken back, training goes on the same."""
    params, x, target = mlp_inputs(32, 32, 48)
    step = amp(sgd, DELAYED)
    history = step.init(params, x, target)
    losses = []
    for turn in range(6):
        if turn == 3:
            leaves, tree = jax.tree.flatten((params, history))
            saved = [np.asarray(leaf).copy() for leaf in leaves]
        (params, loss), history = step(history, params, x, target)
        losses.append(float(loss))
    params, history = jax.tree.unflatten(tree, saved)
    for turn in range(3, 6):
        (params, loss), history = step(history, params, x, target)
        assert float(loss) == losses[turn]
    assert losses[-1] < losses[0]


def test_static_arguments_and_results():
    """Words and bools are constants, and results need not be arrays."""

    def fn(x, w, *, word, flip):
        return {"out": -(x @ w) if flip else x @ w, "word": word}

    x = jnp.ones((16, 16))
    step = amp(fn, DELAYED)
    history = step.init(x, x, word="a", flip=True)
    out, _ = step(history, x, x, word="b", flip=False)
    assert out["word"] == "b"
    np.testing.assert_array_equal(out["out"], 16)


def test_each_shape_has_results_of_its_own():
    """What is returned beside arrays is that of the arguments' shapes, whichever came last."""
    step = amp(lambda x, _: (x @ SQUARES[0], len(x)), DELAYED)
    no_hash = {"a set"}
    history = step.init(SQUARES[1], no_hash)
    rows = [step(history, jnp.ones((n, 16)), no_hash)[0][1] for n in (16, 32, 16)]
    assert rows == [16, 32, 16]


def test_objects_are_changed_by_steps_alone():
    """A history is found without changing the flax module that a step updates in place."""

    def fn(model, x):
        model.kernel[...] = 2 * model.kernel[...]
        return model(x)

    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    before = np.asarray(model.kernel[...])
    step = amp(fn, DELAYED)
    history = step.init(model, SQUARES[1])
    np.testing.assert_array_equal(model.kernel[...], before)
    step(history, model, SQUARES[1])
    np.testing.assert_array_equal(model.kernel[...], 2 * before)


def test_the_gradient_belongs_inside():
    """A step without its gradient cannot be differentiated, and says so."""
    x = jnp.ones((16, 16))
    dot = amp(jnp.dot, DELAYED)
    history = dot.init(x, x)
    with pytest.raises(RewriteError, match="inside"):
        jax.grad(lambda x: jnp.sum(dot(history, x, x)[0]))(x)


@pytest.fixture(scope="module")
def squared():
    """A small step with its history."""
    step = amp(jnp.dot, DELAYED)
    return step, step.init(*SQUARES)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda history: SQUARES[0], "history first, but got float32[16,16]"),
        (lambda history: {"w": SQUARES[0]}, "history first"),
        (lambda history: None, "history first"),
        (lambda history: {}, "not this step's"),
        (lambda history: jax.tree.map(lambda a: a[:2], history), "not this step's"),
        (lambda history: jax.tree.map(lambda a: a[None], history), "not this step's"),
        (lambda history: {**history, "99:loop": jnp.ones(4)}, "not this step's"),
    ],
)
def test_what_is_no_history_of_the_step_is_refused(squared, spoil, says):
    """One that was forgotten, or that of another step, is named; nothing is computed with it."""
    step, history = squared
    with pytest.raises(TrainingError, match=re.escape(says)):
        step(spoil(history), *SQUARES)


@pytest.fixture(scope="module")
def looped():
    """A step whose products are in a scan, its arguments and its history."""

    def fn(x, weights):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, weights)[0]

    step, args = (
        amp(fn, DELAYED.replace(scaling={"ends": True})),
        (SQUARES[0], jnp.ones((3, 16, 16))),
    )
    return step, args, step.init(*args)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda window: {},
        lambda window: {"0:loop": {}},
        lambda window: {"0:loop": window},
        lambda window: {"0:loop": {"amax": {"amax": window}}},
        lambda window: {"0:loop": {"amax": window, "0:loop": {}}},
        lambda window: {"0:loop": {"amax": window[:2]}},
        lambda window: {"0:loop": {"amax": window[:, :2]}},
        lambda window: {"0:loop": {"amax": window[..., :1]}},
        lambda window: {"0:loop": {"amax": jnp.pad(window, [(0, 0), (0, 0), (0, 1)])}},
        lambda window: {"0:loop": {"amax": window.astype(jnp.bfloat16)}},
        lambda window: {"0:loop": {"amax": window}, "amax": window[0]},
    ],
)
def test_the_history_of_a_loop_is_its_own(looped, spoil):
    """One with other iterations, steps, tensors, dtype or loops is refused, before any work."""
    step, args, history = looped
    assert history["0:loop"]["amax"].shape == (3, 4, 2)
    with pytest.raises(TrainingError, match="not this step's"):
        step(spoil(history["0:loop"]["amax"]), *args)


def test_the_history_of_a_loop_goes_on(looped):
    """A step takes what the step before has returned."""
    step, args, history = looped
    _, after = step(history, *args)
    step(after, *args)


def test_methods_are_bound():
    """A decorated method has its object, and compiles once for all of its uses."""

    traces = []

    class Model:
        @amp(policy=DELAYED)
        def step(self, w, x):
            traces.append(self)
            return x @ w

    model = Model()
    history = model.step.init(*SQUARES)
    for _ in range(2):
        product, history = model.step(history, *SQUARES)
    np.testing.assert_array_equal(product, 1)
    assert traces == [model]


def test_a_step_is_lowered_with_its_history():
    """Ahead of time, as other functions are; the static argument is the function's first."""

    @amp(policy=DELAYED, static_argnums=0)
    def step(scale, w, x):
        return scale * (x @ w) if scale > 1 else x

    history = step.init(2.0, *SQUARES)
    want, _ = step(history, 2.0, *SQUARES)
    got, _ = step.lower(history, 2.0, *SQUARES).compile()(history, *SQUARES)
    np.testing.assert_array_equal(got, want)


def test_a_step_is_looked_at_without_its_history(squared):
    """Plans are those of the function under the policy; it has a text."""
    step, _ = squared
    assert str(plan_of(step)(*SQUARES)) == str(plan_of(jnp.dot, DELAYED)(*SQUARES))
    assert repr(step).endswith("fp8_delayed*>")


def test_other_policies_are_tried_without_the_history(squared):
    """As `debug_step` does, which looks for one under which the step is finite."""
    step, history = squared
    with overriding(lambda _: PrecisionPolicy.ALWAYS_F32):
        product, after = step(history, *SQUARES)
    np.testing.assert_array_equal(product, 1)
    assert after == {}


@pytest.mark.parametrize("transform", [scaled_value_and_grad, scaled_filter_grad])
def test_gradients_belong_into_the_step(transform):
    """A history has no place in jaxamp's own gradients, and they say so."""
    with pytest.raises(TrainingError, match="Put amp around the step"):
        transform(jnp.dot, policy="fp8_delayed")


def test_serving_has_no_history():
    """There are no steps that it could be of."""
    with pytest.raises(PolicyError, match="fp8_current"):
        serve(jnp.dot, *SQUARES, policy="fp8_delayed")
