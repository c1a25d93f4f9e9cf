"""A product before a fixed point is lowered, one that a search compares is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxamp import amp, report
from tests.fields.measure import TIMES
from tests.fields.oracle import Oracle, evaluated
from tests.programs.registry import Draw

WIDTH = 16
DRAW = Draw("loop states")
X, W = DRAW.normal(8, WIDTH), DRAW.normal(WIDTH, WIDTH, scale=WIDTH**-0.5)
SQUARE = DRAW.normal(WIDTH, WIDTH, scale=0.3 * WIDTH**-0.5)
LOW = {"auto_mixed_bf16": jnp.bfloat16, "auto_mixed": jnp.float16}

Array = jax.Array
Program = Callable[[Array, Array], Any]
Search = Callable[[Array, Array, Array], Array]


def until(test: Callable[..., Array], body: Callable[..., Any], *start: Any) -> Any:
    return lax.while_loop(lambda s: test(*s), lambda s: body(*s), start)


def settled(step: Callable[[Array], Array], start: Array) -> Array:
    """Iterate until nothing moves by more than 1e-5."""

    def is_moving(z: Array, before: Array, turn: int) -> Array:
        return (jnp.abs(z - before).max() > 1e-5) & (turn < 100)

    return until(is_moving, lambda z, _, turn: (step(z), z, turn + 1), start, start + 1, 0)[0]


def equilibrium(x: Array, w: Array) -> Array:
    h = x @ w
    return settled(lambda z: jnp.tanh(z @ SQUARE + h), jnp.zeros_like(h))


def equilibrium_of_error(x: Array, w: Array) -> Array:
    """The error is compared a turn later."""
    h = jax.nn.gelu(x @ w)

    def is_moving(_: Array, error: Array, turn: int) -> Array:
        return (error > 1e-5) & (turn < 100)

    def turn(z: Array, _: Array, turn: int) -> tuple[Array, Array, int]:
        new = jnp.tanh(z @ SQUARE + h)
        return new, jnp.abs(new - z).max(), turn + 1

    return until(is_moving, turn, jnp.zeros_like(h), jnp.float32(1), 0)[0]


def equilibrium_of_layers(x: Array, w: Array) -> Array:
    """What is iterated on enters a loop over layers."""
    h, layers = x @ w, jnp.stack([SQUARE, SQUARE.T])

    def step(z: Array) -> Array:
        return lax.scan(lambda z, w: (jnp.tanh(z @ w + h), None), z @ SQUARE, layers)[0]

    return settled(step, jnp.zeros_like(h))


def kepler(x: Array, w: Array) -> Array:
    """Newton's iteration."""
    mean = x @ w

    def step(z: Array) -> Array:
        return z - (z - 0.5 * jnp.sin(z) - mean) / (1 - 0.5 * jnp.cos(z))

    return jnp.cos(settled(step, jnp.zeros_like(mean)))


def projected_gradient(x: Array, w: Array) -> Array:
    """The step has the size of a product."""
    h = x @ w
    gram, slope = h.T @ h, h.T @ x
    size = 1 / jnp.trace(gram)
    return settled(lambda z: jnp.maximum(z - size * (gram @ z - slope), 0.0), jnp.zeros_like(slope))


def transport(x: Array, w: Array) -> Array:
    """Sinkhorn's iteration on logarithms."""
    cost = x @ w / WIDTH**0.5

    def step(f: Array) -> Array:
        g = -jax.nn.logsumexp(f[:, None] - cost, 0)
        return -jax.nn.logsumexp(g - cost, 1)

    return settled(step, jnp.zeros(8))


LOWERED: dict[Program, list[bool]] = {
    equilibrium: [True, False],
    equilibrium_of_error: [True, False],
    equilibrium_of_layers: [True, False, False],
    kepler: [False],  # a phase
    projected_gradient: [True, True, True, False],
    transport: [True],
}
"""Which products are narrow, in program order."""


def lowered(fn: Callable[..., Any], policy: str, *args: Array) -> list[bool]:
    return [o.arithmetic != "f32" for o in report(fn, policy)(*args).contractions]


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("program", LOWERED)
def test_only_what_a_fixed_point_iterates_on_is_kept(program: Program, policy: str) -> None:
    found = lowered(program, policy, X, W)
    assert sorted(found) == sorted(LOWERED[program])


@pytest.mark.parametrize("policy", LOW)
def test_what_a_later_loop_compares_is_kept(policy: str) -> None:
    def shrunk(x: Array, w: Array) -> Array:
        z = jnp.abs(equilibrium(x, w)).max()
        return until(lambda t: t * z > 0.1, lambda t: (t / 2,), jnp.float32(1))[0]

    assert lowered(shrunk, policy, X, W) == [False, False]


@pytest.mark.product
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("program", LOWERED)
def test_a_fixed_point_is_moved_as_far_as_by_rounding_products(
    program: Program, policy: str
) -> None:
    exact, rounded = evaluated(
        program, (X, W), [Oracle(np.float64), Oracle(np.float32, LOW[policy])]
    )
    off = np.abs(np.float64(amp(program, policy)(X, W)) - exact).max()
    assert 0 < off <= TIMES * np.abs(rounded - exact).max()


POINTS = DRAW.normal(60, 5)
LABELS = jnp.float32(POINTS.sum(1) > 0)


def objective(w: Array) -> Array:
    scores = POINTS @ w
    return jnp.mean(jnp.logaddexp(0, scores) - LABELS * scores) + 0.05 * w @ w


def excess(w: Array, value: Array, slope: Array, t: Array) -> Array:
    return objective(w - t * slope) - value + 0.3 * t * jnp.sum(slope**2)


def compared(w: Array, value: Array, slope: Array) -> Array:
    return until(lambda t: excess(w, value, slope, t) > 0, lambda t: (t / 2,), jnp.float32(4))[0]


def flagged(w: Array, value: Array, slope: Array) -> Array:
    """The loop goes on until a flag is set."""

    def turn(t: Array, _: Array) -> tuple[Array, Array]:
        return t / 2, excess(w, value, slope, t / 2) <= 0

    return until(lambda _, done: ~done, turn, jnp.float32(8), jnp.array(False))[0]


def kept_excess(w: Array, value: Array, slope: Array) -> Array:
    """What is compared is kept for the next turn."""

    def turn(t: Array, _: Array) -> tuple[Array, Array]:
        return t / 2, excess(w, value, slope, t / 2)

    return until(lambda _, e: e > 0, turn, jnp.float32(8), jnp.float32(1))[0]


def least_excess(w: Array, value: Array, slope: Array) -> Array:
    """What is compared is the least so far."""

    def turn(t: Array, least: Array) -> tuple[Array, Array]:
        return t / 2, jnp.minimum(least, excess(w, value, slope, t / 2))

    return until(lambda _, e: e > 0, turn, jnp.float32(8), jnp.float32(1))[0]


def unmoved(w: Array, value: Array, slope: Array) -> Array:
    """The step is compared with itself, and moves by a comparison."""

    def turn(t: Array, _: Array) -> tuple[Array, Array]:
        return jnp.where(excess(w, value, slope, t) > 0, t / 2, t), t

    return until(lambda t, before: t < before, turn, jnp.float32(4), jnp.float32(8))[0]


def unmoved_by_a_sign(w: Array, value: Array, slope: Array) -> Array:
    def turn(t: Array, _: Array) -> tuple[Array, Array]:
        return t * (0.75 - 0.25 * jnp.sign(excess(w, value, slope, t))), t

    return until(lambda t, before: t < before, turn, jnp.float32(4), jnp.float32(8))[0]


def interpolated(w: Array, value: Array, slope: Array) -> Array:
    """The next step is the minimum of a parabola."""
    square = jnp.sum(slope**2)

    def turn(t: Array, found: Array) -> tuple[Array, Array]:
        t = jnp.clip(square * t * t / (2 * (found - value + square * t)), 0.1 * t, 0.5 * t)
        return t, objective(w - t * slope)

    def is_worse(t: Array, found: Array) -> Array:
        return found > value - 0.3 * t * square

    return until(is_worse, turn, jnp.float32(4), objective(w - 4 * slope))[0]


SEARCHES = (compared, flagged, kept_excess, least_excess, unmoved, unmoved_by_a_sign, interpolated)


@pytest.mark.product("search")
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("search", SEARCHES)
def test_what_a_search_compares_is_float32(search: Search, policy: str) -> None:
    def descend(w: Array) -> Array:
        def step(w: Array, _: None) -> tuple[Array, None]:
            value, slope = jax.value_and_grad(objective)(w)
            return w - search(w, value, slope) * slope, None

        return lax.scan(step, w, None, length=3)[0]

    assert not any(lowered(descend, policy, jnp.zeros(5)))
