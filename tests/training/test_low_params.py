"""Parameters narrower than float32: masters, stochastic rounding, Kahan compensation."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jaxamp
from jaxamp import training
from jaxamp.errors import TrainingError

WRAPPERS: dict[str, Any] = {
    "master weights": training.with_master_weights,
    "stochastic rounding": training.with_stochastic_rounding,
    "kahan": training.with_kahan,
}
wrappers = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


def run(optimizer: Any, params: Any, grads: Any, steps: int) -> tuple[Any, Any]:
    """The same gradients, again and again, compiled."""

    @jax.jit
    def all_steps(params: Any) -> Any:
        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), length=steps)[0]

    return all_steps(params)


@wrappers
@pytest.mark.parametrize("amped", [False, True])
def test_small_steps_add_up(wrap, amped):
    """Steps of a fortieth of the distance to the next number move a parameter all the same."""
    params = {"w": jnp.ones(512, jnp.bfloat16), "b": jnp.ones(2)}
    grads = jax.tree.map(jnp.ones_like, params)
    runner = jaxamp.amp(run) if amped else run
    optimizer = wrap(optax.sgd(2.0**-12))
    moved, _ = runner(optimizer, params, grads, 256)
    assert moved["w"].dtype == jnp.bfloat16
    assert float(moved["w"].astype(jnp.float32).mean()) == pytest.approx(1 - 2.0**-4, abs=5e-4)
    assert float(moved["b"][0]) == 1 - 2.0**-4
    stuck, _ = run(optax.sgd(2.0**-12), params, grads, 256)
    assert (stuck["w"] == 1).all()


@wrappers
def test_small_steps_add_up_where_xla_may_keep_precision(wrap):
    """XLA's leave to drop a narrowing and its widening does not undo the rounding.

    That leave is XLA's default, which the other tests take away.
    """
    optimizer, params = wrap(optax.sgd(2.0**-12)), jnp.ones(512, jnp.bfloat16)

    def steps(params: Any) -> Any:
        return run(optimizer, params, jnp.ones(512), 256)[0]

    options = {"xla_allow_excess_precision": True}
    moved = jax.jit(steps).lower(params).compile(options)(params)
    assert float(moved.astype(jnp.float32).mean()) == pytest.approx(1 - 2.0**-4, abs=5e-4)


def test_parameters_are_their_masters_rounded():
    """After every step each parameter is the nearest number to its master, bit by bit."""
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=1000), jnp.bfloat16)
    optimizer = training.with_master_weights(optax.adam(0.1))
    state = optimizer.init(params)
    for _ in range(20):
        grads = jnp.asarray(rng.normal(size=1000), jnp.float32)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(params, state.master.astype(jnp.bfloat16))


def test_masters_are_what_float32_training_gives():
    """With the same gradients the masters are, bit by bit, the parameters of a float32 run."""
    params = jnp.linspace(-1, 1, 64).astype(jnp.bfloat16)
    grads = jnp.linspace(1, 2, 64)
    _, state = run(training.with_master_weights(optax.adam(1e-3)), params, grads, 10)
    expected, _ = run(optax.adam(1e-3), params.astype(jnp.float32), grads, 10)
    np.testing.assert_array_equal(state.master, expected)


def test_float16_masters():
    """Masters and Kahan take float16 too; stochastic rounding says that it does not."""
    params, grads = jnp.ones(4, jnp.float16), jnp.ones(4)
    for wrap in (training.with_master_weights, training.with_kahan):
        moved, _ = run(wrap(optax.sgd(2.0**-13)), params, grads, 256)
        assert moved.dtype == jnp.float16
        assert float(moved[0]) == pytest.approx(1 - 2.0**-5, abs=5e-4)
    with pytest.raises(TrainingError, match="float16 cannot be rounded stochastically"):
        run(training.with_stochastic_rounding(optax.sgd(1.0)), params, grads, 1)


def test_compensation_is_the_part_that_rounding_took():
    """Parameter plus compensation follows the float32 run, to 2⁻¹⁸ a step."""
    params, grads = jnp.linspace(0.5, 2, 50).astype(jnp.bfloat16), jnp.linspace(1, 3, 50)
    moved, state = run(training.with_kahan(optax.adam(1e-3)), params, grads, 100)
    expected, _ = run(optax.adam(1e-3), params.astype(jnp.float32), grads, 100)
    total = moved.astype(jnp.float32) + state.compensation.astype(jnp.float32)
    assert state.compensation.dtype == jnp.bfloat16
    np.testing.assert_allclose(total, expected, rtol=100 * 2.0**-18)
    assert np.abs(np.asarray(moved, np.float32) - expected).max() > 1e-3


@wrappers
def test_moments_are_float32(wrap):
    """Adam's second moment would stand still in bfloat16, so the state inside is float32."""
    state = wrap(optax.adam(1e-3)).init({"w": jnp.ones(3, jnp.bfloat16)})
    moments = [x for x in jax.tree.leaves(state.inner_state) if x.dtype != jnp.int32]
    assert {x.dtype for x in moments} == {jnp.dtype("float32")}


@wrappers
def test_needs_parameters(wrap):
    """An update without parameters is refused, for they are what is rounded."""
    optimizer = wrap(optax.sgd(1.0))
    with pytest.raises(TrainingError, match="update needs them"):
        optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)))


@pytest.mark.product("wrap", every=2)
@wrappers
def test_modules(wrap):
    """Modules of equinox, partitioned as for optax, keep their dtypes."""
    model = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
    model = jax.tree.map(lambda w: w.astype(jnp.bfloat16) if eqx.is_array(w) else w, model)
    optimizer = wrap(optax.adam(1e-3))
    floats, rest = eqx.partition(model, eqx.is_inexact_array)
    state = optimizer.init(floats)
    grads = training.scaled_filter_grad(lambda m, x: jnp.sum(m(x) ** 2))(model, jnp.ones(3)).result
    updates, _ = optimizer.update(grads, state, floats)
    moved = eqx.combine(optax.apply_updates(floats, updates), rest)
    assert jax.tree.structure(moved) == jax.tree.structure(model)
    changed = jax.tree.map(
        lambda a, b: a.dtype == b.dtype == jnp.bfloat16 and bool((a != b).any()),
        *(eqx.filter(m, eqx.is_array) for m in (model, moved)),
    )
    assert any(jax.tree.leaves(changed))


@wrappers
def test_a_skipped_step_leaves_no_trace(wrap):
    """Under a loss scale a bad step changes no parameter, master, compensation or random number."""
    optimizer = training.with_loss_scale(wrap(optax.adam(1e-2)), training.StaticLossScale(1.0))
    params = jnp.linspace(-1, 1, 64).astype(jnp.bfloat16)
    grads = jnp.linspace(1, 2, 64)

    def trajectory(script: list[Any]) -> Any:
        current, state = params, optimizer.init(params)
        for spoiled in script:
            updates, state = optimizer.update(spoiled, state, current)
            current = optax.apply_updates(current, updates)
        return current, state.inner_state

    spoiled = trajectory([grads, grads.at[3].set(jnp.nan), grads])
    jax.tree.map(np.testing.assert_array_equal, spoiled, trajectory([grads, grads]))


@pytest.mark.product("wrap", every=2)
@wrappers
def test_a_run_restored_from_a_checkpoint_goes_on_bit_by_bit(wrap, tmp_path):
    """Preempted, saved by orbax and restored: masters, compensation and random numbers go on."""
    optimizer = training.with_loss_scale(wrap(optax.adam(1e-2)), training.DynamicLossScale(8.0))
    params = jnp.linspace(-1, 1, 64).astype(jnp.bfloat16)

    def steps(carry: Any, first: int, last: int) -> Any:
        for step in range(first, last):
            params, state = carry
            bad = jnp.nan if step == 1 else 0.0
            grads = jnp.linspace(1, 2, 64).at[3].add(bad) * 8 * (step + 1)
            updates, state = optimizer.update(grads, state, params)
            carry = optax.apply_updates(params, updates), state
        return carry

    start = params, optimizer.init(params)
    half = steps(start, 0, 3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "half", half)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "half", start)
    resumed, straight = steps(restored, 3, 6), steps(half, 3, 6)
    jax.tree.map(np.testing.assert_array_equal, resumed, straight)
    assert straight[1].skip.skipped == 1


def test_stochastic_runs_repeat_and_differ_by_seed():
    """One seed, one trajectory; another seed, another; leaves of one shape round differently."""
    params = {"a": jnp.ones(256, jnp.bfloat16), "b": jnp.ones(256, jnp.bfloat16)}
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 1.0), params)

    def ends(seed: int) -> Any:
        optimizer = training.with_stochastic_rounding(optax.sgd(2.0**-10), seed)
        return run(optimizer, params, grads, 3)[0]

    first, again, other = ends(0), ends(0), ends(1)
    assert (first["a"] == again["a"]).all()
    assert (first["a"] != other["a"]).any()
    assert (first["a"] != first["b"]).any()
