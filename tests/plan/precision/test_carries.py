"""Carries: which are narrow, and that what stops a loop is compared as float32 would compare it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxamp import amp, plan_of
from jaxamp.core.formats import Precision
from jaxamp.jaxprs.nested import loop
from tests.audit import equations

LOW = ("auto_mixed_bf16", "auto_mixed")
STEPS = 12


@pytest.mark.product
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("seed", range(3))
def test_a_line_search_accepts_the_same_steps(seed: int, policy: str) -> None:
    """Where the value to beat is rounded and what is tried is not, no step is short enough."""
    random = np.random.default_rng(seed)
    x = jnp.asarray(random.normal(size=(50, 5)), jnp.float32)
    y = jnp.float32(x @ jnp.asarray(random.normal(size=5), jnp.float32) > 0)

    def objective(w: jax.Array) -> jax.Array:
        scores = x @ w
        return jnp.mean(jnp.logaddexp(0, scores) - y * scores) + 0.05 * w @ w

    def descend(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(w: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            value, slope = jax.value_and_grad(objective)(w)

            def is_worse(t: jax.Array) -> jax.Array:
                return objective(w - t * slope) > value - 0.3 * t * jnp.sum(slope**2)

            size = lax.while_loop(
                lambda t: is_worse(t) & (t > 1e-30), lambda t: t / 2, jnp.float32(4)
            )
            return w - size * slope, size

        return lax.scan(step, w, None, length=STEPS)

    (w, sizes), (exact, _) = amp(descend, policy)(jnp.zeros(5)), descend(jnp.zeros(5))
    assert np.min(sizes) > 1e-3
    assert objective(w) <= 1.01 * objective(exact)


@pytest.mark.parametrize("policy", LOW)
def test_the_first_residual_of_a_solver_is_as_exact_as_the_others(policy: str) -> None:
    random = np.random.default_rng(0)
    square = random.normal(size=(40, 40))
    a = jnp.asarray(square @ square.T + 40 * np.eye(40), jnp.float32)
    b = jnp.asarray(random.normal(size=40), jnp.float32)
    exact = np.linalg.solve(np.float64(a), np.float64(b))

    def solve(b: jax.Array, x: jax.Array) -> jax.Array:
        def turn(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            x, r, p, squares = carry
            moved = a @ p
            size = squares / (p @ moved)
            r = r - size * moved
            return x + size * p, r, r + r @ r / squares * p, r @ r

        r = b - a @ x
        return lax.while_loop(lambda carry: carry[3] > 1e-10, turn, (x, r, r, r @ r))[0]

    found = amp(solve, policy)(b, jnp.float32(exact + 0.1))
    assert np.linalg.norm(found - exact) <= 1e-5 * np.linalg.norm(exact)


@pytest.mark.parametrize("policy", LOW)
def test_what_is_computed_before_a_loop_stays_narrow(policy: str) -> None:
    """Only the last product before the values that are compared is float32."""
    w = jnp.eye(8) / 2

    def settled(x: jax.Array) -> jax.Array:
        x = jnp.tanh(jnp.tanh(x @ w) @ w) @ w
        return lax.while_loop(
            lambda z: jnp.max(jnp.abs(z - jnp.tanh(z @ w + x))) > 1e-3,
            lambda z: jnp.tanh(z @ w + x),
            x,
        )

    plan = plan_of(settled, policy)(jnp.ones((4, 8)))
    dots = [d for d in plan.body.decisions if d.eqn.primitive.name == "dot_general"]
    wide = [d.operand is Precision.F32 for d in dots]
    assert wide == [False, False, True]


@pytest.mark.parametrize("policy", LOW)
def test_what_chooses_a_branch_is_not_rounded_for_a_product_beside_it(policy: str) -> None:
    """Rounded, the rows have a mean of zero."""
    x = jnp.tile(jnp.float32([1.0003, -1.0001]), (4, 4))
    w = jnp.ones((8, 2))

    def chosen(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = lax.cond(x[0, 0] > 0, lambda x: x, jnp.negative, x)
        sign = lax.cond(rows.mean() > 0, lambda: 1, lambda: -1)
        return rows @ w, sign

    assert amp(chosen, policy)(x)[1] == 1


@pytest.mark.parametrize("around", [lambda carry: carry, lax.optimization_barrier])
def test_a_state_is_narrow_beside_an_average_of_itself(around: Callable[..., Any]) -> None:
    """A barrier around both carries moves each by itself: it adds neither to the other."""

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        def turn(carry: tuple[jax.Array, ...], row: jax.Array) -> tuple[Any, None]:
            state, average = carry
            return around((jnp.tanh(state @ w + row), 0.9 * average + state)), None

        start = x @ w
        (state, average), _ = lax.scan(turn, (start, jnp.zeros_like(start)), jnp.stack([start] * 3))
        return jnp.mean((state @ w) ** 2) + jnp.mean(average)

    closed = jax.make_jaxpr(amp(run))(jnp.ones((4, 8)), jnp.ones((8, 8)))
    (scan,) = [eqn for eqn in equations(closed.jaxpr) if eqn.primitive.name == "scan"]
    assert [var.aval.dtype for var in scan.outvars] == [jnp.bfloat16, jnp.float32]


def test_what_is_made_of_earlier_turns_is_narrow() -> None:
    """That it is made of an activation is known when a loop has been gone through three times."""
    w = jnp.ones((8, 8))

    def turn(carry: tuple[jax.Array, ...], row: jax.Array) -> tuple[Any, jax.Array]:
        last, before = carry
        return (jnp.tanh(row @ w), last), jnp.sin(before) @ w

    def run(rows: jax.Array) -> jax.Array:
        return lax.scan(turn, (jnp.zeros((4, 8)),) * 2, rows)[1]

    decisions = plan_of(run)(jnp.ones((5, 4, 8))).decisions()
    assert [d.output for d in decisions if d.primitive == "sin"] == [Precision.BF16]


@pytest.mark.parametrize("policy", LOW)
def test_an_integrator_keeps_its_small_increments(policy: str) -> None:
    """The same step adds to a computed value: a rounded carry would swallow what is added."""
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.normal(size=(16, 16)), jnp.float32) for _ in range(2))
    rate = jnp.float32(1e-4)

    def integrate(x: jax.Array, w: jax.Array) -> jax.Array:
        def step(state: jax.Array, _: None) -> tuple[jax.Array, None]:
            return state + rate * jnp.cos(state @ w / 16), None

        start = x @ w
        end, _ = lax.scan(step, start, None, length=200)
        return (end - start) @ w

    exact, moved = integrate(x, w), amp(integrate, policy)(x, w)
    eps = float(jnp.finfo(jnp.bfloat16 if policy == LOW[0] else jnp.float16).eps)
    assert np.max(np.abs(moved - exact)) <= 8 * eps * np.max(np.abs(exact))


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_backward_pass_of_layers_keeps_parts_of_weights_and_a_narrow_carry(
    is_masked: bool,
) -> None:
    """The layer takes its weights apart, and looked-up rows are masked, as where they are split."""
    keys = jax.random.split(jax.random.key(0), 3)
    table, weights = jax.random.normal(keys[0], (64, 32)), jax.random.normal(keys[1], (4, 64, 32))
    words = jax.random.randint(keys[2], (8, 16), 0, 64)

    def loss(table: jax.Array, weights: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ weight[:32] / 6) @ weight[32:] / 6, None

        rows = table[words]
        if is_masked:
            rows = jnp.where(words[..., None] < 32, rows, 0)
        x, _ = lax.scan(layer, rows, weights)
        return jnp.mean(jnp.square(x @ table.T))

    made = jax.make_jaxpr(amp(jax.grad(loss), "mixed_bf16"))(table, weights)
    (backward,) = (
        eqn
        for eqn in equations(made.jaxpr)
        if eqn.primitive.name == "scan" and eqn.params["reverse"]
    )
    carried = backward.outvars[: loop(backward).carries]
    assert {v.aval.dtype.name for v in carried if v.aval.shape == (8, 16, 32)} == {"bfloat16"}


def test_a_cotangent_that_a_loop_carries_back_is_not_rounded_in_every_turn() -> None:
    """The state of a retention decays by little, less than a rounding of its cotangent."""
    seeds = jax.random.split(jax.random.key(0), 3)
    queries, keys, values = (jax.random.normal(seed, (64, 2, 8, 16)) for seed in seeds)

    def read_last(values: jax.Array) -> jax.Array:
        decay = jnp.exp(jnp.linspace(-(2.0**-8), -(2.0**-12), 2))[:, None, None]

        def step(state: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
            q, k, v = chunk
            new = jnp.einsum("nlh,nlg->nhg", k, v)
            return state * decay + new, jnp.einsum("nlh,nhg->nlg", q, state)

        _, read = lax.scan(step, jnp.zeros((2, 16, 16)), (queries, keys, values))
        return jnp.sum(read[-1])

    exact, found = jax.grad(read_last)(values)[0], jax.grad(amp(read_last))(values)[0]
    assert jnp.linalg.norm(found - exact) < 0.01 * jnp.linalg.norm(exact)


def test_a_state_that_gates_multiply_is_stacked_once() -> None:
    """In float32, as the gates' cotangents need it; the transpose of a product rounds it again."""
    seeds = jax.random.split(jax.random.key(0), 4)
    xs = jax.random.normal(seeds[0], (8, 4, 16))
    weights = [jax.random.normal(seed, (16, 16)) for seed in seeds[1:]]

    def loss(weights: list[jax.Array]) -> jax.Array:
        def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            key, query, gate = (x @ w for w in weights)
            read = jnp.einsum("nk,nkv->nv", query, state)
            kept = state * jax.nn.sigmoid(gate)[:, :, None]
            return kept + key[:, :, None] * read[:, None], read

        _, read = lax.scan(step, jnp.ones((4, 16, 16)), xs)
        return jnp.sum((read @ weights[1]) ** 2)

    made = jax.make_jaxpr(jax.grad(amp(loss, "mixed_bf16")))(weights)
    loops = (eqn for eqn in equations(made.jaxpr) if eqn.primitive.name == "scan")
    stacks = [v.aval for eqn in loops for v in eqn.outvars if v.aval.shape == (8, 4, 16, 16)]
    assert [aval.dtype.name for aval in stacks] == ["float32"]


def test_places_whose_differences_a_layer_reads_stay_float32() -> None:
    """Of places far from zero and near each other a rounding leaves no difference."""
    seeds = jax.random.split(jax.random.key(0), 3)
    shapes = (64, 64), (64, 64), (4, 64, 64)
    args = [jax.random.normal(seed, shape) for seed, shape in zip(seeds, shapes, strict=True)]

    def refined(features: jax.Array, first: jax.Array, weights: jax.Array) -> jax.Array:
        def layer(places: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            apart = places[:, None] - places
            return places + jnp.tanh(apart).sum(1) @ weight, None

        places, _ = lax.scan(layer, features @ first, weights)
        return jnp.sum((places @ first.T) ** 2)

    made = jax.make_jaxpr(amp(refined, "mixed_bf16"))(*args)
    (layers,) = (eqn for eqn in equations(made.jaxpr) if eqn.primitive.name == "scan")
    assert layers.outvars[0].aval.dtype == jnp.float32


def _gru(w: jax.Array, h: jax.Array, x: jax.Array) -> jax.Array:
    by = h @ w
    z, r = jnp.split(jax.nn.sigmoid(x[:, :32] + by[:, :32]), 2, axis=1)
    return (1 - z) * jnp.tanh(x[:, 32:] + r * by[:, 32:]) + z * h


def _leaky(w: jax.Array, h: jax.Array, x: jax.Array) -> jax.Array:
    return 0.95 * h + 0.05 * jnp.tanh((h @ w + x)[:, :16])


UNITS = {"GRU": _gru, "leaky": _leaky}


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("start", [None, jnp.full((4, 16), 0.5)], ids=["zeros", "given"])
def test_products_that_curves_read_for_a_state_are_narrow(
    start: jax.Array | None, name: str
) -> None:
    """The state is float32, for its increments; what a curve makes of a product is as exact."""
    seeds = jax.random.split(jax.random.key(0), 4)
    xs = jax.random.normal(seeds[0], (256, 4, 24))
    enter, w, out = (
        jax.random.normal(seed, shape) * shape[0] ** -0.5
        for seed, shape in zip(seeds[1:], [(24, 48), (16, 48), (16, 3)], strict=True)
    )

    def run(xs: jax.Array, start: jax.Array | None, cast: Any = lambda x: x) -> jax.Array:
        def turn(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return cast(UNITS[name](cast(w), h, x)), None

        first = cast(jnp.zeros((4, 16)) if start is None else start)
        return lax.scan(turn, first, cast(xs) @ cast(enter))[0] @ cast(out)

    plan = plan_of(run)(xs, start)
    products = [d.output for d in plan.decisions() if d.primitive == "dot_general"]
    assert products == [Precision.BF16, Precision.BF16, Precision.F32]
    (scan,) = [
        e
        for e in equations(jax.make_jaxpr(amp(run))(xs, start).jaxpr)
        if e.primitive.name == "scan"
    ]
    assert scan.outvars[0].aval.dtype == jnp.float32
    exact, ours = run(xs, start), amp(run)(xs, start)
    by_hand = run(xs, start, lambda x: x.astype(jnp.bfloat16))
    assert jnp.linalg.norm(ours - exact) <= jnp.linalg.norm(by_hand - exact)


@pytest.mark.parametrize("added", [lambda h, w: jnp.tanh(h) @ jnp.tanh(w), lambda h, w: h @ w])
def test_products_that_are_added_to_a_state_stay_float32(added: Callable[..., jax.Array]) -> None:
    """Beside a curve, too: their roundings would add up in it."""

    def run(h: jax.Array, w: jax.Array) -> jax.Array:
        def turn(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            return h + 0.01 * (added(h, w) + jnp.tanh(h)), None

        return lax.scan(turn, h, length=9)[0] @ w

    decisions = plan_of(run)(jnp.ones((4, 16)), jnp.ones((16, 16))).decisions()
    products = [d.output for d in decisions if d.primitive == "dot_general"]
    assert products == [Precision.F32, Precision.F32]


def test_gradients_of_parameters_drawn_inside_stay_float32() -> None:
    """They are a carry that products read, too, but no curve is between it and a gradient."""

    def train(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ w).sum(1) - y) ** 2)

        def step(carry: Any, _: None) -> tuple[Any, None]:
            w, m, v = carry
            grad = jax.grad(loss)(w)
            m, v = 0.9 * m + 0.1 * grad, 0.9 * v + 0.1 * grad**2
            return (w - 0.01 * m / (jnp.sqrt(v) + 1e-8), m, v), None

        w = jax.random.normal(jax.random.key(0), (16, 64))
        (w, *_), _ = lax.scan(step, (w, jnp.zeros_like(w), jnp.zeros_like(w)), length=3)
        return jnp.tanh(x @ w) @ jnp.ones((64, 2))

    decisions = plan_of(train)(jnp.ones((32, 16)), jnp.ones(32)).decisions()
    products = [d for d in decisions if d.primitive == "dot_general"]
    gradients = [d for d in products if 32 not in d.eqn.outvars[0].aval.shape]
    assert [d.output for d in gradients] == [Precision.F32]
