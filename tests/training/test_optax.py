"""Optimizers that leave a bad step out: nothing of theirs has moved, and nothing has waited."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jaxamp
from jaxamp import training
from jaxamp.errors import TrainingError
from jaxamp.training import DynamicLossScale, StaticLossScale

PARAMS = {"w": jnp.array([1.0, -2.0, -0.0]), "b": jnp.array(0.5)}
X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32))

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "clipped adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "schedule": lambda: optax.adam(optax.exponential_decay(0.1, 1, 0.5)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 10)
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"slow": optax.sgd(0.01), "fast": optax.adam(0.1)}, {"w": "fast", "b": "slow"}
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), every_k_schedule=2),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "ema": lambda: optax.chain(optax.adam(0.1), optax.ema(0.9)),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
    "lion": lambda: optax.lion(0.1),
    "adafactor": lambda: optax.adafactor(0.1),
    "plateau": lambda: optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1)),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "prodigy": lambda: optax.contrib.prodigy(0.1),
}
OVER = [pytest.param(make, id=name) for name, make in OPTIMIZERS.items()]


def bits(tree: Any) -> list[Any]:
    """Every leaf as bytes, so that NaN, minus zero and keys compare."""

    def leaf_bits(leaf: Any) -> bytes:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf).tobytes()

    return jax.tree.map(leaf_bits, jax.tree.leaves(tree))


def loss_fn(params: Any) -> jax.Array:
    """A quadratic with its minimum elsewhere."""
    return jnp.mean((X @ params["w"] + params["b"] - 1.0) ** 2)


def make_step(optimizer: Any, size: float = 1.0) -> Any:
    """A compiled step of the scaled loss, times `size`; `spoil` is added to one gradient."""

    @jax.jit
    def step(params: Any, state: Any, spoil: Any) -> Any:
        def scaled(params: Any) -> Any:
            loss = loss_fn(params) * size
            return state.loss_scale.scale(loss), loss

        (_, value), grads = jax.value_and_grad(scaled, has_aux=True)(params)
        grads["w"] = grads["w"].at[1].add(spoil)
        updates, state = optimizer.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.product("make", every=4)
@pytest.mark.parametrize("make", OVER)
def test_bad_steps_never_happened(make):
    """Good, bad, good gives bit by bit what good, good gives, but for the scale and its count."""
    optimizer = training.with_loss_scale(make(), DynamicLossScale(8.0, period=100))
    step = make_step(optimizer)
    runs = []
    for script in ((0.0, np.nan, 0.0, np.inf, 0.0), (0.0, 0.0, 0.0)):
        params, state = PARAMS, optimizer.init(PARAMS)
        for spoil in script:
            before = params, state
            params, state = step(params, state, spoil)
            if not np.isfinite(spoil):
                assert bits((params, state.inner_state)) == bits((before[0], before[1].inner_state))
                assert not state.grads_finite
        runs.append((params, state))
    (params, state), (expected, expected_state) = runs
    assert bits((params, state.inner_state)) == bits((expected, expected_state.inner_state))
    assert (state.loss_scale.loss_scale, expected_state.loss_scale.loss_scale) == (2.0, 8.0)
    assert (state.skip.skipped, expected_state.skip.skipped) == (2, 0)


@pytest.mark.parametrize(
    "make", [OPTIMIZERS[name] for name in ("clipped adamw", "multi_transform", "MultiSteps")]
)
def test_good_steps_are_the_optimizers_own(make):
    """A scale that is a power of two changes no bit of what the optimizer does alone."""
    scaled, plain = training.with_loss_scale(make(), StaticLossScale(1024)), make()
    params = expected = PARAMS
    state, expected_state = scaled.init(params), plain.init(params)
    if isinstance(plain, optax.MultiSteps):
        plain = plain.gradient_transformation()
    plain = optax.with_extra_args_support(plain)
    step = make_step(scaled)

    @jax.jit
    def plain_step(params, state):
        value, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = plain.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    for _ in range(4):
        params, state = step(params, state, 0.0)
        expected, expected_state = plain_step(expected, expected_state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, expected)


def test_the_flag_of_value_and_grad_is_enough():
    """Gradients that are unscaled already, and clipped to numbers, are skipped by their flag."""
    optimizer = training.skip_nonfinite(optax.adam(0.1))
    state = optimizer.init(PARAMS)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    updates, skipped = optimizer.update(grads, state, PARAMS, grads_finite=jnp.bool_(False))
    assert bits(optax.apply_updates(PARAMS, updates)) == bits(PARAMS)
    assert bits(skipped.inner_state) == bits(state.inner_state)
    updates, moved = optimizer.update(grads, state, PARAMS, grads_finite=jnp.bool_(True))
    assert moved.inner_state[0].count == 1
    assert all((u != 0).all() for u in jax.tree.leaves(updates))


def test_narrow_gradients_reach_the_optimizer_in_float32():
    """Float16 gradients that are tiny once unscaled are not rounded to zero before Adam."""
    optimizer = training.with_loss_scale(optax.adam(0.1, eps=1e-20), StaticLossScale(2.0**24))
    params = jnp.ones(3, jnp.float16)
    state = optimizer.init(params)
    updates, _ = optimizer.update(jnp.full(3, 2.0**-10, jnp.float16), state, params)
    np.testing.assert_allclose(updates, -0.1, rtol=1e-3)


def test_members_of_a_vmap_skip_by_themselves():
    """An ensemble: the member that overflowed waits, the others move."""
    optimizer = training.with_loss_scale(optax.adam(0.1), DynamicLossScale(8.0))
    params = jnp.ones((3, 2))
    state = jax.vmap(optimizer.init)(params)
    grads = jnp.ones((3, 2)).at[1, 0].set(jnp.nan)
    updates, state = jax.vmap(optimizer.update)(grads, state, params)
    assert (updates[1] == 0).all()
    assert (updates[jnp.array([0, 2])] != 0).all()
    assert state.loss_scale.loss_scale.tolist() == [8.0, 4.0, 8.0]
    assert state.inner_state[0].count.tolist() == [1, 0, 1]


def test_nothing_waits_for_the_device():
    """The update is one program without branches, so not even the device waits for a flag."""
    optimizer = training.with_loss_scale(optax.adamw(0.1))
    jaxpr = jax.make_jaxpr(optimizer.update)(PARAMS, optimizer.init(PARAMS), PARAMS)
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    assert not names & {"cond", "while", "pure_callback", "io_callback", "debug_callback"}


def test_state_and_parameters_can_be_donated():
    """Every buffer of the state has one owner, also in the first step, twice over."""
    first = DynamicLossScale(jnp.float32(8.0))
    optimizer = training.with_loss_scale(training.with_master_weights(optax.adam(0.1)), first)

    def step(params, state):
        grads = jax.tree.map(jnp.ones_like, params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(2):
        params = jax.tree.map(jnp.array, PARAMS)
        state = optimizer.init(params)
        for _ in range(2):
            params, state = jax.jit(step, donate_argnums=(0, 1))(params, state)
    assert first.loss_scale == 8.0


def test_jmp_scales_in_the_state():
    """A jmp scale is adjusted as jmp would, and stays jmp's."""
    scale = jmp.DynamicLossScale(jnp.float32(8.0), period=2)
    optimizer = training.with_loss_scale(optax.sgd(0.1), scale)
    step = make_step(optimizer)
    params, state = PARAMS, optimizer.init(PARAMS)
    for spoil, expected in ((0.0, 8.0), (0.0, 16.0), (jnp.nan, 8.0)):
        params, state = step(params, state, spoil)
        assert isinstance(state.loss_scale, jmp.DynamicLossScale)
        assert state.loss_scale.loss_scale == expected


@pytest.mark.product("make", every=2)
@pytest.mark.parametrize(
    "make", [OPTIMIZERS[name] for name in ("schedule", "MultiSteps", "inject_hyperparams", "noise")]
)
def test_a_run_restored_from_a_checkpoint_goes_on_bit_by_bit(make, tmp_path):
    """Interrupted after a bad step, saved by orbax, restored: the same trajectory."""
    optimizer = training.with_loss_scale(make(), DynamicLossScale(8.0, period=2))
    step = make_step(optimizer)
    script = [0.0, jnp.nan, 0.0, 0.0, jnp.inf, 0.0, 0.0, 0.0]

    def run(carry: Any, script: Any) -> list[Any]:
        carries = [carry]
        for spoil in script:
            carries.append(step(*carries[-1], spoil))
        return carries

    carries = run((PARAMS, optimizer.init(PARAMS)), script)
    half = jax.tree.map(as_saved, carries[5])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "half", half)
        checkpointer.wait_until_finished()
        template = jax.tree.map(as_saved, (PARAMS, optimizer.init(PARAMS)))
        restored = checkpointer.restore(tmp_path / "half", template)
    resumed = jax.tree.map(as_was, restored, carries[5])
    assert jax.tree.map(bits, run(resumed, script[5:])) == jax.tree.map(bits, carries[5:])


def as_saved(leaf: Any) -> Any:
    """A leaf as a checkpoint takes it: keys by their data."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def as_was(leaf: Any, like: Any) -> Any:
    """A leaf as it was before it was saved."""
    is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    return jax.random.wrap_key_data(leaf) if is_key else leaf


def test_inside_amp():
    """A whole step under amp skips and adjusts as one outside does."""
    optimizer = training.with_loss_scale(optax.adam(0.1), DynamicLossScale(2.0**17, period=1))
    step = jaxamp.amp(make_step(optimizer, size=1e-3), "auto_mixed")
    params, state = step(PARAMS, optimizer.init(PARAMS), 0.0)
    assert state.grads_finite
    assert state.loss_scale.loss_scale == 2.0**18
    moved, state = step(params, state, jnp.nan)
    assert bits(moved) == bits(params)
    assert state.loss_scale.loss_scale == 2.0**17


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: training.with_loss_scale(0.1), "is not an optimizer"),
        (lambda: training.with_loss_scale(optax.sgd(0.1), 8.0), "is not a loss scale"),
        (lambda: training.skip_nonfinite(optax.adam), "is not an optimizer"),
    ],
)
def test_wrong_arguments_teach(make, message):
    """What is no optimizer or no scale is refused when it is given."""
    with pytest.raises(TrainingError, match=message):
        make()
