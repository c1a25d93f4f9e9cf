"""Planning takes time that is linear in the program, counted in calls of functions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxamp import PrecisionPolicy
from jaxamp.core import jax_compat
from jaxamp.plan import plan_program
from tests.calls import entered

X, W = jnp.ones((8, 64)), jnp.ones((64, 64))
FEW, MANY = 24, 96
Loss = Callable[[Any, jax.Array], jax.Array]


def layers(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """A residual network whose weights, and so their gradients, are larger than a batch."""
    for w in weights:
        x = x + jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def loops(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Recurrences one after the other, the state of the first of which is an input."""
    for w in weights:
        x = lax.scan(lambda h, _, w=w: (jnp.tanh(h @ w), None), x, None, length=3)[0]
    return jnp.mean(x**2)


def shared(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """A recurrence written out: its steps add up the gradients of one matrix."""
    for _ in weights:
        x = jnp.tanh(x @ weights[0])
    return jnp.mean(x**2)


def totals(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Squared differences of products, added up one after the other."""
    return sum((jnp.mean((x @ w - jnp.sin(x) @ w) ** 2) for w in weights), jnp.zeros(()))


def solver(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Conjugate gradients: what remains in each step is what the first has left, less products."""
    rest = direction = x
    for _ in weights:
        made = direction @ weights[0]
        rest = rest - jnp.sum(rest**2) / jnp.sum(direction * made) * made
        direction = rest + 0.5 * direction
    return jnp.mean(direction**2)


def orbits(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Places that their differences move in each step."""
    for _ in weights:
        apart = x[:, None] - x
        x = x - 0.01 * jnp.sum(apart / (jnp.sum(apart**2, -1, keepdims=True) + 0.1), 0)
    return jnp.mean(x**2)


def slopes(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Differences of all layers at two near places."""
    near, total = (x + 0.01, x - 0.01), jnp.zeros(())
    for w in weights:
        one, other = near = jnp.tanh(near[0] @ w), jnp.tanh(near[1] @ w)
        total += jnp.mean((one - other) ** 2)
    return total


def fading(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """A sum of an array that is scaled in each step."""
    total = x @ weights[0]
    for _ in weights:
        x = 0.99 * x
        total = total + x
    return jnp.mean(total**2)


def descents(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Steps to what a matrix makes of a target, each of which subtracts a product."""
    target = jnp.sin(x)
    for _ in weights:
        x = x - 0.1 * (x @ weights[0] - target) @ weights[0].T
    return jnp.mean(x**2)


def flows(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Points that all near ones attract, by distances of which squares make products small."""
    for w in weights:
        squares = jnp.sum(x**2, -1)
        x = x - jnp.exp(2 * x @ x.T - squares[:, None] - squares) @ x @ w
    return jnp.mean(x**2)


def added(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Recurrences that add to one residual stream."""
    for w in weights:
        x += lax.scan(lambda h, _, w=w: (h + jnp.tanh(h @ w), None), x, None, length=3)[0]
    return jnp.mean(x**2)


def handed_on(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Recurrences for a metric, each from where the one before has ended."""
    state = jnp.tanh(x @ weights[0])
    for w in weights:
        state = lax.scan(lambda h, _, w=w: (jnp.tanh(h @ w), None), state, None, length=3)[0]
    return jnp.mean((x @ weights[0]) ** 2) + lax.stop_gradient(jnp.mean(state**2))


LOSSES = [
    *(layers, loops, shared, totals, solver, orbits, slopes, fading),
    *(descents, flows, added, handed_on),
]


def _calls(loss: Loss, count: int) -> float:
    """Calls of functions for each layer, to plan value and gradient of so many."""
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))([W] * count, X)
    return entered(lambda: plan_program(jaxpr, PrecisionPolicy.MIXED_BF16)) / count


@pytest.mark.product("loss", every=2)
@pytest.mark.parametrize("loss", LOSSES)
def test_four_times_as_many_layers_take_four_times_as_long(loss: Loss):
    """A layer of many is planned in as many calls as one of few."""
    _calls(loss, FEW)  # what is imported and looked up once
    assert _calls(loss, MANY) < 1.1 * _calls(loss, FEW)


def test_what_products_of_known_numbers_multiply_is_not_computed(monkeypatch: pytest.MonkeyPatch):
    """Places of words times frequencies: XLA compiled a program for each operation on them."""
    monkeypatch.setattr(jax_compat, "computed", lambda eqn, _: pytest.fail(str(eqn)))

    def rotated(x: jax.Array, w: jax.Array) -> jax.Array:
        places = jnp.cumsum(jnp.where(jnp.ones(8, jnp.int32) == 0, 0, 1)) - 1.0
        turns = jnp.einsum("t,k->tk", places, 1e4 ** -(jnp.arange(64) / 64))
        return x @ w * jnp.cos(turns)

    plan = plan_program(jax.make_jaxpr(rotated)(X, W), PrecisionPolicy.MIXED_BF16)
    assert [d.operand for d in plan.decisions() if d.primitive == "dot_general"][-1].short == "bf16"
