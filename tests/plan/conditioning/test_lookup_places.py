"""Lookups at computed places: coordinates stay float32, and what is made of them to weigh by."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.ndimage import map_coordinates

from jaxamp import amp, plan_of
from tests.numerics.oracle import products_rounded
from tests.programs.registry import Draw

DRAW = Draw("lookup places")
ROWS, WIDTH, ENTRIES = 64, 32, 512
X = DRAW.normal(ROWS, WIDTH)
W, V = DRAW.weight(WIDTH, WIDTH), DRAW.weight(WIDTH, WIDTH)
TABLE = jnp.asarray(np.sin(np.linspace(0, 12, ENTRIES), dtype="f"))
IMAGE = jnp.asarray(np.sin(np.arange(64) / 5)[:, None] * np.cos(np.arange(64) / 7), "f")
FEATURES = jnp.asarray(DRAW.normal(ENTRIES, WIDTH))
GRID = jnp.asarray(np.linspace(0, 100, ENTRIES), "f")

Program = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def interpolated(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.interp(50 + 40 * jnp.tanh(x @ w), GRID, TABLE) @ v


def learnt_curve(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    curve = jnp.cumsum(jax.nn.softplus(TABLE))
    return jnp.interp(50 + 40 * jnp.tanh(x @ w), GRID, curve) @ v


def bilinear(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    places = jnp.split(31.5 + 31 * jnp.tanh(x @ w), 2, axis=1)
    return map_coordinates(IMAGE, places, order=1) @ v[: WIDTH // 2]


def by_hand(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    place = jax.nn.sigmoid(x @ w) * (ENTRIES - 1)
    low = jnp.floor(place)
    part, index = place - low, low.astype(int)
    above = TABLE[jnp.minimum(index + 1, ENTRIES - 1)]
    return ((1 - part) * TABLE[index] + part * above) @ v


def durations(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """Frames of a text to speech model, each in the token during which it is heard."""
    ends = jnp.cumsum(jax.nn.softplus(x @ w), axis=1)
    times = jnp.linspace(0, 20, WIDTH)
    tokens = jax.vmap(lambda row: jnp.searchsorted(row, times))(ends)
    starts = jnp.take_along_axis(jnp.pad(ends, ((0, 0), (1, 0))), tokens, axis=1)
    return (times - starts) @ v


def hash_grid(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    points = jax.nn.sigmoid(x @ w)[:, :2]
    levels = []
    for size in (16, 32, 64, 128):
        corner = jnp.floor(points * size)
        part, corner = points * size - corner, corner.astype(jnp.uint32)
        total = jnp.zeros((ROWS, WIDTH))
        for right in (0, 1):
            for up in (0, 1):
                key = (corner[:, 0] + right) ^ ((corner[:, 1] + up) * jnp.uint32(2654435761))
                across = part[:, 0] if right else 1 - part[:, 0]
                along = part[:, 1] if up else 1 - part[:, 1]
                total += (across * along)[:, None] * FEATURES[key % ENTRIES]
        levels.append(total)
    return jnp.concatenate(levels, axis=1) @ jnp.tile(v, (4, 1))


def quantiles(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    rows = jnp.sort(x @ w, axis=1)
    place = jnp.linspace(0.1, 30.0, WIDTH)
    index = jnp.floor(place).astype(int)
    part = place - index
    return (rows[:, index] * (1 - part) + rows[:, index + 1] * part) @ v


def spline_bins(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    knots = jnp.cumsum(jax.nn.softmax(x @ w), axis=-1) * 10 - 5
    y = jnp.clip(x[:, :1], -4, 4)
    index = jnp.clip(jnp.sum(y >= knots, axis=-1, keepdims=True), 1, WIDTH - 1)
    low, high = (jnp.take_along_axis(knots, index - i, axis=1) for i in (1, 0))
    return ((y - low) / (high - low) * jnp.ones((1, WIDTH))) @ v


def warped(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    flow = 4 * jnp.tanh(x @ w).reshape(2, 32, 32)
    rows, columns = jnp.meshgrid(jnp.arange(32.0), jnp.arange(32.0), indexing="ij")
    places = [rows + flow[0], columns + flow[1]]
    return map_coordinates(IMAGE[:32, :32], places, order=1, mode="nearest") @ v


PROGRAMS = (
    *(interpolated, learnt_curve, bilinear, by_hand, durations),
    *(hash_grid, quantiles, spline_bins, warped),
)
LOW = {"mixed_bf16": jnp.bfloat16, "mixed_f16": jnp.float16}


def _far(found: jax.Array, exact: jax.Array) -> float:
    exact = np.asarray(exact, np.float64)
    return float(np.linalg.norm(np.float64(found) - exact) / np.linalg.norm(exact))


@pytest.mark.product("program", every=3)
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("program", PROGRAMS)
def test_places_are_as_exact_as_with_products_alone_rounded(program: Program, policy: str) -> None:
    exact, hand = program(X, W, V), products_rounded(program, LOW[policy])(X, W, V)
    assert _far(amp(program, policy)(X, W, V), exact) <= 1.25 * _far(hand, exact)


@pytest.mark.product("program", every=3)
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize("program", [p for p in PROGRAMS if p is not hash_grid])  # it has jumps
def test_so_are_gradients(program: Program, order: str, policy: str) -> None:
    def loss(fn: Program) -> Callable[[jax.Array], jax.Array]:
        return lambda w: jnp.mean(fn(X, w, V) ** 2)

    inside = order == "grad(amp(f))"
    mixed = jax.grad(loss(amp(program, policy))) if inside else amp(jax.grad(loss(program)), policy)
    exact = jax.grad(loss(program))(W)
    hand = jax.grad(loss(products_rounded(program, LOW[policy])))(W)
    assert _far(mixed(W), exact) <= 1.5 * _far(hand, exact)


def test_what_actions_are_drawn_from_is_no_place() -> None:
    """Training that draws actions, moves a state by a table and learns."""
    moves = jnp.array([-1.0, 0.0, 1.0, 2.0])

    def policy(params, state):
        hidden = jnp.tanh(state @ params["in"] + params["bias"])
        return jax.nn.log_softmax(hidden @ params["out"] + params["prior"])

    def loss(params, states, actions):
        return -jnp.take_along_axis(policy(params, states), actions[:, None], 1).mean()

    def train(params, state, key):
        def step(carry, key):
            params, state = carry
            actions = jax.random.categorical(key, policy(params, state))
            state = state + 0.1 * moves[actions][:, None]
            gradient = jax.grad(loss)(params, state, actions)
            norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
            return (jax.tree.map(lambda p, g: p - 0.1 * g / norm, params, gradient), state), None

        return jax.lax.scan(step, (params, state), jax.random.split(key, 4))[0]

    shapes = {"in": (8, 16), "bias": (16,), "out": (16, 4), "prior": (4,)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    decisions = plan_of(train)(params, jnp.ones((32, 8)), jax.random.key(0)).decisions()
    reasons = {d.reason for d in decisions if d.primitive == "dot_general"}
    assert not any("look something up" in reason for reason in reasons)
