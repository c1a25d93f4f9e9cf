"""A whole training step under amp: the model runs low, the update is the float32 update."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array, lax

from jaxamp import PrecisionPolicy, amp
from tests import audit
from tests.numerics.ulps import LOW, POLICIES
from tests.programs.registry import Draw

STEPS = 2000
RATE = 1e-6
Tree = Any

optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(RATE, weight_decay=0.01))
each = pytest.mark.parametrize("low", LOW)


class State(NamedTuple):
    """What training carries from step to step."""

    params: Tree
    moments: Tree
    average: Tree


class Report(NamedTuple):
    """What a step shows beside the new state."""

    loss: Array
    gradients: Tree


def _initial() -> State:
    draw = Draw("training step")
    sizes = (8, 16, 4)
    params = [
        {"w": draw.weight(rows, cols), "b": draw.normal(cols, scale=0.1)}
        for rows, cols in itertools.pairwise(sizes)
    ]
    params = jax.tree.map(jnp.asarray, params)
    return State(params, optimizer.init(params), params)


def _batches(count: int) -> tuple[np.ndarray, np.ndarray]:
    draw = Draw("training batches")
    return draw.normal(count, 8, 8), draw.normal(count, 8, 4, scale=3.0)


def loss_of(params: Tree, x: Array, y: Array) -> Array:
    """Mean squared error of a network with one hidden layer."""
    for layer in params[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return jnp.mean((x @ params[-1]["w"] + params[-1]["b"] - y) ** 2)


def update(state: State, gradients: Tree) -> State:
    """The float32 update: clip by global norm, AdamW, average of weights."""
    updates, moments = optimizer.update(gradients, state.moments, state.params)
    params = optax.apply_updates(state.params, updates)
    average = jax.tree.map(lambda a, p: 0.999 * a + 0.001 * p, state.average, params)
    return State(params, moments, average)


def step(state: State, batch: tuple[Array, Array]) -> tuple[State, Report]:
    """The whole step, as the user writes it."""
    loss, gradients = jax.value_and_grad(loss_of)(state.params, *batch)
    return update(state, gradients), Report(loss, gradients)


def train(state: State, batches: tuple[Array, Array]) -> tuple[State, Report]:
    """All steps as one scan."""
    return lax.scan(step, state, batches)


@pytest.mark.product
@each
def test_steps_follow_the_float32_update(low: str) -> None:
    """After 2,000 steps at 1e-6 every bit is that of the float32 update of the same gradients."""
    xs, ys = _batches(16)
    mixed_step, plain_update = jax.jit(amp(step, POLICIES[low])), jax.jit(update)
    mixed = plain = _initial()
    for i in range(STEPS):
        mixed, report = mixed_step(mixed, (xs[i % 16], ys[i % 16]))
        plain = plain_update(plain, report.gradients)
    _assert_same_bits(mixed, plain)


@each
def test_scan_follows_the_float32_update(low: str) -> None:
    """The same with the steps in a scan that is decorated as a whole."""
    mixed, report = jax.jit(amp(train, POLICIES[low]))(_initial(), _batches(STEPS))
    plain, _ = jax.jit(_updates)(_initial(), report.gradients)
    _assert_same_bits(mixed, plain)


@each
@pytest.mark.parametrize("program", [step, train], ids=lambda f: f.__name__)
def test_the_model_runs_low(low: str, program: Any) -> None:
    """Every product of the decorated step, forward and backward, has low operands."""
    batches = _batches(4) if program is train else tuple(b[0] for b in _batches(4))
    jaxpr = jax.make_jaxpr(amp(program, POLICIES[low]))(_initial(), batches).jaxpr
    products = audit.products(jaxpr)
    assert len(products) == 5
    assert all(p.operands == (LOW[low], LOW[low]) for p in products)


@each
def test_a_step_is_lost_in_low_precision(low: str) -> None:
    """The test is not idle: the table without guards freezes or ruins most of the weights."""
    policy = PrecisionPolicy.parse(POLICIES[low]).replace(guards=())
    literal_step = jax.jit(amp(step, policy))
    before = _initial()
    rounded = jax.tree.map(lambda p: p.astype(LOW[low]).astype(jnp.float32), before.params)
    after, _ = literal_step(before._replace(params=rounded), tuple(b[0] for b in _batches(1)))
    pairs = zip(jax.tree.leaves(rounded), jax.tree.leaves(after.params), strict=True)
    lost = np.concatenate([np.ravel((a == b) | ~jnp.isfinite(b)) for a, b in pairs])
    assert lost.mean() > 0.9


def _updates(state: State, gradients: Tree) -> tuple[State, None]:
    return lax.scan(lambda s, g: (update(s, g), None), state, gradients)


def _assert_same_bits(mixed: State, plain: State) -> None:
    """Equal to the last bit, and moved: by less than the low formats resolve, but everywhere."""
    initial = _initial()
    for name, got, want, first in zip(State._fields, mixed, plain, initial, strict=True):
        for g, w, f in zip(*map(jax.tree.leaves, (got, want, first)), strict=True):
            np.testing.assert_array_equal(g, w, err_msg=name)
            assert np.mean(np.asarray(g != f)) > 0.9
