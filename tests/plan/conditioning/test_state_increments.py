"""Boundary values to which a network adds little, read as differences."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxamp import amp, plan_of
from jaxamp.core.formats import Precision
from tests.programs.registry import Draw
from tests.tolerances import EPS

LOW = {"mixed_bf16": "bfloat16", "mixed_f16": "float16"}
DRAW = Draw("state increments")
ROWS, WIDTH, LAYERS = 64, 32, 10
W = DRAW.normal(LAYERS, WIDTH, WIDTH, scale=WIDTH**-0.5)
C, M = 1e5 + DRAW.normal(2, ROWS, WIDTH, scale=10)

Rollout = Callable[..., jax.Array]


def turns(count: int, *, own: bool) -> Rollout:
    def run(c: jax.Array, m: jax.Array, w: jax.Array) -> jax.Array:
        for i in range(count):
            c = c + jnp.tanh((c - m) / 10 @ w[i * own])
        return (c - m) @ w[0]

    return run


def scanned(c: jax.Array, m: jax.Array, w: jax.Array) -> jax.Array:
    c, _ = lax.scan(lambda c, w: (c + jnp.tanh((c - m) / 10 @ w), None), c, w)
    return (c - m) @ w[0]


def looped(c: jax.Array, m: jax.Array, w: jax.Array) -> jax.Array:
    c = lax.fori_loop(0, 5, lambda _, c: c + jnp.tanh((c - m) / 10 @ w[0]), c)
    return (c - m) @ w[0]


def refined(c: jax.Array, m: jax.Array, w: jax.Array) -> jax.Array:
    """Coordinates that are read as differences of neighbours."""
    for i in range(3):
        c = c + jnp.tanh((c - jnp.roll(c, 1, axis=0)) / 10 @ w[i])
    return (c - jnp.roll(c, 1, axis=0)) @ w[0]


def normalized(c: jax.Array, m: jax.Array, w: jax.Array) -> jax.Array:
    """A forecast that is scaled back, and compared with the last observation."""
    mean, scale = c.mean(axis=0), c.std(axis=0)
    forecast = mean + scale * jnp.tanh((c - mean) / scale @ w[0])
    return ((forecast - c) / scale) @ w[1]


def noisy(c: jax.Array, m: jax.Array, w: jax.Array) -> jax.Array:
    noise = Draw("noise").normal(4, *c.shape)
    for i in range(4):
        c = c + 0.1 * jnp.tanh((c - m) / 10 @ w[i]) + 0.3 * noise[i]
    return (c - m) @ w[0]


PROGRAMS: dict[str, Rollout] = {
    **{f"{n} turns": turns(n, own=False) for n in (1, 2, 5, 10)},
    **{f"{n} layers": turns(n, own=True) for n in (2, 5, 10)},
    "scan": scanned,
    "loop": looped,
    "neighbours": refined,
    "normalized": normalized,
    "noise": noisy,
}


def _far(found: jax.Array, exact: jax.Array) -> float:
    exact = np.asarray(exact, np.float64)
    return float(np.linalg.norm(np.float64(found) - exact) / np.linalg.norm(exact))


@pytest.mark.product("name")
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", PROGRAMS)
def test_increments_survive(name: str, policy: str) -> None:
    program = PROGRAMS[name]
    assert _far(amp(program, policy)(C, M, W), program(C, M, W)) <= 4 * EPS[LOW[policy]]


@pytest.mark.product("name", every=2)
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "loop"])
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
def test_gradients_of_rollouts(name: str, order: str, policy: str) -> None:
    """Of the mean over all, whose cotangents are in the range of float16."""
    program = PROGRAMS[name]

    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean(program(C, M, w) ** 2)

    inside = order == "grad(amp(f))"
    mixed = jax.grad(amp(loss, policy)) if inside else amp(jax.grad(loss), policy)
    assert _far(mixed(W), jax.grad(loss)(W)) <= 16 * EPS[LOW[policy]]


def test_parameters_that_tasks_adapt_are_read_beside_those_they_began_with() -> None:
    """Each task has a copy of them, which is no longer of their size."""
    x = C[:32, :WIDTH].reshape(2, 16, WIDTH) / 1e5

    def loss(w: jax.Array) -> jax.Array:
        def task(x: jax.Array) -> jax.Array:
            def proximal(v: jax.Array) -> jax.Array:
                return jnp.mean((jnp.tanh(x @ v) @ v - x) ** 2) + ((v - w) ** 2).sum()

            v = w
            for _ in range(3):
                v = v - 0.005 * jax.grad(proximal)(v)
            return ((v - w) ** 2).sum()

        return jax.vmap(task)(x).mean()

    assert _far(amp(loss)(W[0]), loss(W[0])) <= EPS["bfloat16"]


def test_a_residual_stream_is_narrow() -> None:
    """A norm reads it as a difference from its own mean, which is rounded with it."""

    def stream(x: jax.Array, w: jax.Array) -> jax.Array:
        for i in range(3):
            x = x + jnp.tanh((x - x.mean(axis=-1, keepdims=True)) @ w[i])
        return x @ w[0]

    decisions = plan_of(stream)(C, W).decisions()
    sums = [d.output for d in decisions if d.primitive == "add"]
    assert Precision.BF16 in sums


def test_scores_of_an_alignment_are_no_residual_stream() -> None:
    """A carry that is shifted and added to: its rounding would be a part of every later score."""

    def score(w: jax.Array, x: jax.Array) -> jax.Array:
        def row(above: jax.Array, gains: jax.Array) -> tuple[jax.Array, None]:
            before = jnp.concatenate([jnp.zeros(1), above[:-1]]) + gains
            return jax.nn.logsumexp(jnp.stack([before, above - 1, 0 * gains]), 0), None

        return jax.nn.logsumexp(lax.scan(row, jnp.zeros(WIDTH), x @ w)[0])

    exact, _ = jax.value_and_grad(score)(W[0], C / 1e5)
    found, _ = amp(jax.value_and_grad(score))(W[0], C / 1e5)
    assert abs(found - exact) < 0.1 * EPS["bfloat16"] * abs(exact)
