"""Gradients under a policy and a loss scale: what comes back, and in which order it is computed."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import jaxamp
from jaxamp import training
from jaxamp.errors import TrainingError
from jaxamp.training import DynamicLossScale, NoOpLossScale, StaticLossScale

POLICIES = ("always_f32", "auto_mixed_bf16", "auto_mixed", None)
SCALES = (None, NoOpLossScale(), StaticLossScale(2.0**8), DynamicLossScale(2.0**8))
RTOL = {"always_f32": 1e-6, "auto_mixed_bf16": 3e-2, "auto_mixed": 5e-3, None: 1e-6}


def loss_fn(params: Any, x: Any, y: Any) -> jax.Array:
    """A two-layer regression."""
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


@pytest.fixture(scope="module")
def problem():
    """Parameters and a batch of twelve."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    params = {"w1": normal(4, 8) / 2, "b1": jnp.zeros(8), "w2": normal(8, 2) / 2}
    return params, normal(12, 4), normal(12, 2)


def close(a: Any, b: Any, rtol: float) -> None:
    """Every leaf is as close as `rtol` of its largest entry."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max()), a, b
    )


@pytest.mark.product("scale")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scale", SCALES, ids=["none", "noop", "static", "dynamic"])
def test_agrees_with_jax(problem, policy, scale):
    """Value and gradients are JAX's up to the policy's rounding; gradients are float32."""
    (loss, grads), finite, adjusted = training.scaled_value_and_grad(
        loss_fn, policy=policy, loss_scale=scale
    )(*problem)
    expected_loss, expected = jax.value_and_grad(loss_fn)(*problem)
    close((loss, grads), (expected_loss, expected), RTOL[policy])
    assert finite
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert type(adjusted) is type(NoOpLossScale() if scale is None else scale)


@pytest.mark.parametrize("argnums", [0, 1, (0, 1), (2, 0)])
def test_argnums_and_keywords(problem, argnums):
    """The differentiated arguments are named as JAX names them; keywords pass."""
    params, x, y = problem
    ours = training.scaled_grad(
        loss_fn, argnums, policy="always_f32", loss_scale=DynamicLossScale()
    )
    result = ours(params, x, y=y).result if argnums == 0 else ours(params, x, y).result
    close(result, jax.grad(loss_fn, argnums)(params, x, y), 1e-6)


def test_aux_comes_back_untouched(problem):
    """Aux is beside the loss, or beside the gradients, as in JAX, and is never scaled."""

    def with_aux(params, x, y):
        return loss_fn(params, x, y), {"mean": x.mean(), "count": len(x)}

    kwargs: dict[str, Any] = {"has_aux": True, "loss_scale": StaticLossScale(1024)}
    ((loss, aux), grads), _, _ = training.scaled_value_and_grad(with_aux, **kwargs)(*problem)
    (grads_again, aux_again), _, _ = training.scaled_grad(with_aux, **kwargs)(*problem)
    assert aux["mean"] == aux_again["mean"] == problem[1].mean()
    assert aux["count"] == 12
    close(loss, loss_fn(*problem), 3e-2)
    close(grads, grads_again, 1e-7)


def test_the_scale_that_was_used_unscales():
    """In a step in which the scale grows, the gradients are what they were in the step before."""
    w = jnp.float32(3)
    scale = DynamicLossScale(period=1)
    for _ in range(4):
        before = scale
        grads, finite, scale = training.scaled_grad(lambda w: w**2, loss_scale=scale)(w)
        assert grads == 6
        assert finite
        assert scale.loss_scale == 2 * before.loss_scale


def test_gradients_are_the_same_for_every_power_of_two(problem):
    """In float32 a scale changes no bit of value or gradient, nor does it under bf16."""
    for policy in ("always_f32", "auto_mixed_bf16"):
        runs = [
            jax.jit(training.scaled_value_and_grad(loss_fn, policy=policy, loss_scale=scale))(
                *problem
            )
            for scale in (None, StaticLossScale(2.0**30))
        ]
        jax.tree.map(np.testing.assert_array_equal, runs[0].result, runs[1].result)


def test_underflow_is_what_the_scale_saves():
    """Float16 gradients below 2⁻²⁵ are lost without a scale and right with one."""
    x = jnp.full((4, 4), 0.5)

    def loss_fn(w):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w)) * 1e-8

    w = jnp.full((4, 4), 0.1)
    expected = jax.grad(loss_fn)(w)
    lost = training.scaled_grad(loss_fn, policy="auto_mixed")(w).result
    saved = training.scaled_grad(
        loss_fn, policy="auto_mixed", loss_scale=DynamicLossScale(2.0**20)
    )(w)
    assert (lost == 0).all()
    close(saved.result, expected, 2e-3)


def test_overflow_in_scaling_is_seen_and_the_loss_is_right():
    """Too large a scale: the flag falls, the scale halves, and the loss that is told is finite."""
    scale = DynamicLossScale(2.0**30)
    x, w = jnp.full((4, 4), 2.0), jnp.full((4, 4), 0.5)
    step = training.scaled_value_and_grad(
        lambda w: jnp.sum(jnp.tanh(x @ w) @ w), policy="auto_mixed", loss_scale=scale
    )
    (loss, grads), finite, adjusted = step(w)
    assert not finite
    assert adjusted.loss_scale == 2.0**29
    assert jnp.isfinite(loss)
    assert training.first_nonfinite(grads) == ""


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_parameters_get_float32_gradients(problem, dtype):
    """Whatever the parameters are stored in, their gradients are float32."""
    params, x, y = problem
    narrow = jax.tree.map(lambda w: w.astype(dtype), params)
    grads = training.scaled_grad(loss_fn, loss_scale=DynamicLossScale(256.0))(narrow, x, y).result
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("loss", [jnp.inf, -jnp.inf, jnp.nan])
def test_a_loss_that_is_not_finite_is_told(loss):
    """An inf or NaN loss comes back as it is, and its gradients lower the flag."""
    step = training.scaled_value_and_grad(lambda w: w * loss, loss_scale=DynamicLossScale(8.0))
    (value, _), finite, adjusted = step(jnp.float32(2))
    np.testing.assert_array_equal(value, loss)
    assert not finite
    assert adjusted.loss_scale == 4


def test_zero_gradients_are_finite():
    """Nothing to learn is no overflow: the scale counts on."""
    grads, finite, adjusted = training.scaled_grad(lambda w: 0 * w, loss_scale=DynamicLossScale())(
        2.0
    )
    assert grads == 0
    assert finite
    assert adjusted.counter == 1


def test_nan_in_one_parameter_is_named(problem):
    """The flag falls, and the parameter that is at fault has a name."""
    params, x, y = problem
    params = {**params, "w2": params["w2"].at[3, 1].set(jnp.nan)}
    (_, grads), finite, _ = jax.jit(training.scaled_value_and_grad(loss_fn))(params, x, y)
    assert not finite
    assert training.first_nonfinite(grads) == "['b1']"
    found = training.explain_nonfinite(training.scaled_value_and_grad(loss_fn))(params, x, y)
    assert found is not None
    assert found.primitive == "input"
    assert found.source == "params['w2']"


# --- Several losses ----------------------------------------------------------------------------


def test_losses_of_separate_models_adjust_once():
    """Two gradients under one scale: both flags decide about the one adjustment."""
    scale = DynamicLossScale(8.0)
    of_a = training.scaled_grad(lambda w: w**2, loss_scale=scale)(jnp.float32(1))
    of_b = training.scaled_grad(lambda w: w * jnp.nan, loss_scale=scale)(jnp.float32(1))
    scale = scale.adjust(of_a.grads_finite & of_b.grads_finite)
    assert scale.loss_scale == 4


# --- Micro-batches -----------------------------------------------------------------------------

MEAN = optax.microbatching.AccumulationType.MEAN


def in_parts(loss_fn: Any, size: int, **options: Any) -> Any:
    """Gradients averaged by optax over micro-batches of so many examples."""

    def of_part(params: Any, x: Any, y: Any) -> Any:
        return training.scaled_value_and_grad(loss_fn, **options)(params, x, y).result

    return optax.microbatch(of_part, argnums=(1, 2), microbatch_size=size, accumulator=MEAN)


@pytest.mark.product("size")
@pytest.mark.parametrize("policy", ["always_f32", "auto_mixed_bf16", "auto_mixed"])
@pytest.mark.parametrize("size", [1, 4, 6, 12])
def test_microbatches_of_optax_average_to_the_batch(problem, policy, size):
    """Mean loss and mean gradients of the parts are those of the whole batch."""
    found = jax.jit(in_parts(loss_fn, size, policy=policy, loss_scale=StaticLossScale(256.0)))
    close(found(*problem), jax.value_and_grad(loss_fn)(*problem), RTOL[policy])


def test_microbatches_under_amp_add_up_in_float32():
    """A thousand small gradients of bf16 parameters after a large one are not lost."""
    x = jnp.full(1024, 2.0**-10).at[0].set(1.0)
    w = jnp.bfloat16(1)
    step = in_parts(lambda w, x, y: jnp.sum(w * x * y), 1, policy=None)
    grads = jaxamp.amp(step)(w, x, jnp.full(1024, 1024.0))[1]
    assert grads == 1.0 + 1023 * 2.0**-10


@pytest.mark.parametrize("part", [0, 1, 2])
def test_nan_in_one_microbatch_is_seen(problem, part):
    """Whichever part is bad, the whole step is."""
    params, x, y = problem
    step = jax.jit(in_parts(loss_fn, 4, loss_scale=StaticLossScale(2.0)))
    assert training.all_finite(step(params, x, y))
    assert not training.all_finite(step(params, x.at[part].set(jnp.nan), y)[1])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"clip_norm": 0.0}, "above 0"),
        ({"loss_scale": 8.0}, "not a loss scale"),
        ({"loss_scale": DynamicLossScale}, r"write DynamicLossScale\(\)"),
        ({"has_aux": True}, r"returns \(loss, aux\), not float32\[\]"),
    ],
)
def test_wrong_options_teach(problem, kwargs, message):
    """What cannot work is refused, and the argument is named."""
    params, x, y = problem
    params = {**params, "b1": jnp.float32(0)}
    with pytest.raises(TrainingError, match=message):
        training.scaled_grad(loss_fn, **kwargs)(params, x, y)


# --- Clipping ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, StaticLossScale(2.0**12)])
@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_clipping_comes_after_unscaling(problem, scale, limit):
    """The norm is that of the true gradients, whatever the scale; small ones stay bit by bit."""
    step = functools.partial(training.scaled_grad, loss_fn, policy="always_f32", loss_scale=scale)
    free = step()(*problem).result
    clipped = step(clip_norm=limit)(*problem).result
    norm = np.sqrt(
        sum(float((np.asarray(g, np.float64) ** 2).sum()) for g in jax.tree.leaves(free))
    )
    if norm <= limit:
        jax.tree.map(np.testing.assert_array_equal, clipped, free)
    else:
        close(clipped, jax.tree.map(lambda g: g * np.float32(limit / norm), free), 1e-5)


def test_clipping_hides_no_infinity():
    """An infinite gradient that clipping makes a number of is still told."""
    step = training.scaled_grad(lambda w: jnp.sum(w * jnp.array([1.0, jnp.inf])), clip_norm=1.0)
    assert not step(jnp.ones(2)).grads_finite


# --- Composition -------------------------------------------------------------------------------


def test_signatures_are_those_of_jax():
    """The leading parameters have JAX's names and order, so that calls can be taken over."""
    for ours, theirs in (
        (training.scaled_grad, jax.grad),
        (training.scaled_value_and_grad, jax.value_and_grad),
    ):
        assert (
            list(inspect.signature(ours).parameters)[:3]
            == list(inspect.signature(theirs).parameters)[:3]
        )


JMP_SCALES = {
    "noop": jmp.NoOpLossScale(),
    "static": jmp.StaticLossScale(jnp.float32(64)),
    "dynamic": jmp.DynamicLossScale(jnp.float32(64), period=2, min_loss_scale=jnp.float32(16)),
}


@pytest.mark.parametrize("scale", JMP_SCALES.values(), ids=JMP_SCALES)
def test_jmp_scales_work_and_come_back(problem, scale):
    """A jmp object goes in, a jmp object comes out, with the numbers that jmp would give."""
    grads, finite, adjusted = training.scaled_grad(loss_fn, policy="always_f32", loss_scale=scale)(
        *problem
    )
    close(grads, jax.grad(loss_fn)(*problem), 1e-6)
    assert type(adjusted) is type(scale)
    expected = scale.adjust(finite)
    assert adjusted.loss_scale == expected.loss_scale
    assert getattr(adjusted, "counter", 0) == getattr(expected, "counter", 0)
    assert getattr(adjusted, "min_loss_scale", 16) == 16


def test_ours_drops_into_code_written_for_jmp(problem):
    """jmp's own idiom, with only the class replaced, in a compiled loop."""
    params, x, y = problem

    def train(loss_scale: Any) -> Any:
        def step(carry, _):
            params, loss_scale = carry
            grads = jax.grad(lambda p: loss_scale.scale(loss_fn(p, x, y)))(params)
            grads = loss_scale.unscale(grads)
            finite = jmp.all_finite(grads)
            loss_scale = loss_scale.adjust(finite)
            moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            return (jmp.select_tree(finite, moved, params), loss_scale), loss_scale.loss_scale

        (params_, _), scales = jax.lax.scan(step, (params, loss_scale), length=9)
        return params_, scales

    args = (jnp.float32(2.0**15), jnp.int32(0), 3)
    ours, theirs = (
        jax.jit(train)(DynamicLossScale(*args)),
        jax.jit(train)(jmp.DynamicLossScale(*args)),
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_whole_run_in_scan_and_vmap(problem):
    """The step is a pure function: it scans with its scale as carry, and maps over seeds."""
    params, x, y = problem

    def run(lr: jax.Array) -> jax.Array:
        def step(carry, _):
            params, scale = carry
            (loss, grads), finite, scale = training.scaled_value_and_grad(
                loss_fn, policy="auto_mixed", loss_scale=scale
            )(params, x, y)
            moved = jax.tree.map(lambda p, g: p - lr * g, params, grads)
            return (training.select_tree(finite, moved, params), scale), loss

        return jax.lax.scan(step, (params, DynamicLossScale(2.0**24, period=5)), length=40)[1]

    losses = jax.jit(jax.vmap(run))(jnp.array([0.0, 0.1]))
    assert (losses[0] == losses[0, 0]).all()
    assert (
        losses[1, 0] == losses[1, 1]
    )  # the first scale is too large, so the first step is left out
    assert losses[1, -1] < 0.5 * losses[1, 0]


def test_inside_amp(problem):
    """A whole train step under amp, with scaled_grad inside, still unscales exactly."""
    params, x, y = problem
    scale = DynamicLossScale(2.0**12)

    @functools.partial(jaxamp.amp, policy="auto_mixed_bf16")
    def step(params, scale):
        return training.scaled_value_and_grad(loss_fn, loss_scale=scale)(params, x, y)

    result, finite, adjusted = step(params, scale)
    close(result, jax.value_and_grad(loss_fn)(params, x, y), RTOL["auto_mixed_bf16"])
    assert finite
    assert adjusted.counter == 1


def test_no_callback_and_no_wait(problem):
    """The program holds no callback, and a trace, in which nothing has a value, gets through."""
    step = training.scaled_value_and_grad(
        loss_fn,
        policy="auto_mixed",
        loss_scale=DynamicLossScale(),
        clip_norm=1.0,
    )
    text = str(jax.make_jaxpr(step)(*problem))
    assert "callback" not in text


@pytest.mark.parametrize("make", [training.scaled_value_and_grad, training.scaled_grad])
def test_an_option_for_the_function_that_was_made_says_where_it_goes(make):
    """A loss scale belongs where the function is made; a parameter of that name is its own."""
    scale = DynamicLossScale()

    def loss_fn(w):
        return jnp.sum(w)

    with pytest.raises(TrainingError, match=r"scaled_value_and_grad\(loss_fn, loss_scale="):
        make(loss_fn)(jnp.ones(2), loss_scale=scale)
    make(lambda w, loss_scale: jnp.sum(w) * loss_scale)(jnp.ones(2), loss_scale=2.0)
