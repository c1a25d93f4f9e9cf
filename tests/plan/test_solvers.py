"""What is before and after an iterative solve or a fixed point is lowered like anything else.

After a solve by factors a product is not: coefficients of both signs may cancel in it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.linalg import cho_factor, cho_solve, solve_triangular
from jax.scipy.sparse.linalg import cg

from jaxamp import amp, plan_of, report
from jaxamp.core.formats import Precision
from tests.programs.registry import Draw
from tests.tolerances import CLASSES

SIDE, WIDTH = 16, 8
DRAW = Draw("solvers")
FIELD = DRAW.normal(2, SIDE, SIDE, 2)
IN = DRAW.normal(3, 3, 2, WIDTH, scale=0.2)
OUT = DRAW.normal(3, 3, WIDTH, 2, scale=0.2)
# These contract: the fixed point is unique.
SQUARE, INNER = jnp.asarray(DRAW.normal(2, SIDE, SIDE, scale=0.3 / SIDE**0.5))
LOW = {"auto_mixed_bf16": jnp.bfloat16, "auto_mixed": jnp.float16}

Program = Callable[[jax.Array, jax.Array], jax.Array]
State = tuple[jax.Array, jax.Array, int]


def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def laplacian(p: jax.Array) -> jax.Array:
    shifts = (jnp.roll(p, by, axis) for axis in (1, 2) for by in (1, -1))
    return 4.1 * p - sum(shifts)


def projected(w: jax.Array, v: jax.Array) -> jax.Array:
    """A network moves a fluid, whose pressure then makes it free of divergence."""
    flow = convolved(jnp.tanh(convolved(FIELD, w)), v)
    divergence = sum(jnp.roll(flow[..., i], -1, i + 1) - flow[..., i] for i in (0, 1))
    pressure = cg(laplacian, divergence, maxiter=60)[0]
    slopes = [pressure - jnp.roll(pressure, 1, axis) for axis in (1, 2)]
    return convolved(jnp.tanh(convolved(flow + jnp.stack(slopes, -1), w)), v)


def equilibrium(w: jax.Array, v: jax.Array) -> jax.Array:
    """A layer iterated to its fixed point, between two others."""
    x = FIELD[..., 0].reshape(-1, SIDE) @ SQUARE

    def step(state: State) -> State:
        z, _, turn = state
        return jnp.tanh(z @ INNER + x), z, turn + 1

    def goes_on(state: State) -> jax.Array:
        z, before, turn = state
        return (jnp.abs(z - before).max() > 1e-5) & (turn < 30)

    start = jnp.zeros_like(x)
    return lax.while_loop(goes_on, step, (start + 1, start, 0))[0] @ SQUARE + w.sum() + v.sum()


def solved(w: jax.Array, v: jax.Array) -> jax.Array:
    """A linear system that no network makes, between convolutions."""
    rows = jnp.eye(SIDE) * 3 + SQUARE
    flow = convolved(jnp.tanh(convolved(FIELD, w)), v)
    return convolved(jnp.tanh(convolved(jnp.linalg.solve(rows, flow), w)), v)


def fitted(w: jax.Array, v: jax.Array) -> jax.Array:
    """A ridge regression on features: their Gram matrix is factored, and stays float32."""
    features = convolved(FIELD, w).reshape(-1, WIDTH)
    gram = features.T @ features + jnp.eye(WIDTH)
    weights = jnp.linalg.solve(gram, features.T @ FIELD.reshape(-1, 2))
    return features @ weights * v.mean()


def _narrow(fn: Program, policy: str) -> list[bool]:
    decisions = plan_of(fn, policy)(IN, OUT).decisions()
    products = [d for d in decisions if d.primitive in ("dot_general", "conv_general_dilated")]
    return [d.operand is not Precision.F32 for d in products]


def _share(fn: Program, policy: str) -> float:
    """The share of the FLOPs of products that stay float32; those of a loop count once."""
    products = report(fn, policy)(IN, OUT).contractions
    wide = sum(o.tally.flops for o in products if o.arithmetic == "f32")
    return wide / sum(o.tally.flops for o in products)


def _gradient(fn: Program) -> Program:
    return jax.grad(lambda w, v: jnp.mean(fn(w, v) ** 2), argnums=(0, 1))


SHARES = {
    projected: (0.0, 0.0),
    solved: (1 / 4, 0.46),
    equilibrium: (1 / 3, None),  # a while loop has no gradient
    fitted: (1 / 3, 0.23),
}
"""What stays float32 forward, and at most in the gradient."""


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("program", SHARES)
def test_the_share_of_flops_that_is_kept(program: Program, policy: str) -> None:
    forward, gradient = SHARES[program]
    assert _share(program, policy) == pytest.approx(forward)
    if gradient is not None:
        assert _share(_gradient(program), policy) <= gradient


@pytest.mark.parametrize("policy", LOW)
def test_only_what_is_iterated_on_or_factored_is_kept(policy: str) -> None:
    assert _narrow(projected, policy) == [True] * 4
    assert _narrow(equilibrium, policy) == [True, False, True]
    assert _narrow(fitted, policy) == [True, False, True, False]
    assert _narrow(solved, policy) == [True, True, False, True]


@pytest.mark.product("program")
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("program", SHARES)
def test_results_are_off_by_a_few_roundings_in_norm(program: Program, policy: str) -> None:
    exact = np.asarray(program(IN, OUT), np.float64)
    off = np.linalg.norm(np.float64(amp(program, policy)(IN, OUT)) - exact)
    assert 0 < off <= CLASSES["deep"] * jnp.finfo(LOW[policy]).eps * np.linalg.norm(exact)


@pytest.mark.feature("cancellation")
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("solve", [jnp.linalg.solve, lambda k, y: cho_solve(cho_factor(k), y)])
def test_the_mean_of_a_gaussian_process_has_the_gradient_of_float32(solve, policy: str) -> None:
    """Coefficients cancel in it, however the solve is spelled; so do cotangents behind them."""
    x, y = jnp.linspace(0, 3, SIDE)[:, None], jnp.sin(jnp.linspace(0, 9, SIDE))

    def mean(y: jax.Array) -> jax.Array:
        k, new = (jnp.exp(-2 * (a - x.T) ** 2) for a in (x, x + 0.1))
        return ((new @ solve(k + 1e-2 * jnp.eye(SIDE), y)) ** 2).sum()

    exact = jax.grad(mean)(y)
    off = jnp.linalg.norm(amp(jax.grad(mean), policy)(y) - exact)
    assert off <= 1e-4 * jnp.linalg.norm(exact)


def _attempt(w: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Try a step of a differential equation, and say how long the next one is."""
    t, y, size = state
    slope = jnp.tanh(y @ w)
    other = jnp.tanh((y + size * slope) @ w)
    excess = jnp.abs(size / 2 * (other - slope)).max() / 1e-3
    accepted = excess <= 1
    grown = size * jnp.clip(0.9 * lax.rsqrt(excess + 1e-6), 0.2, 5.0)
    new = y + size / 2 * (slope + other)
    return jnp.where(accepted, t + size, t), jnp.where(accepted, new, y), grown


def _start(y: jax.Array) -> tuple[jax.Array, ...]:
    return jnp.float32(0), y, jnp.float32(0.5)


@jax.custom_vjp
def integrated(w: jax.Array, y: jax.Array) -> jax.Array:
    return lax.while_loop(lambda s: s[0] < 1, lambda s: _attempt(w, s), _start(y))[1]


def _again(w: jax.Array, y: jax.Array) -> jax.Array:
    def step(state: tuple[jax.Array, ...], _: None) -> tuple[tuple[jax.Array, ...], None]:
        return lax.cond(state[0] < 1, lambda s: _attempt(w, s), lambda s: s, state), None

    return lax.scan(step, _start(y), None, length=40)[0][1]


integrated.defvjp(
    lambda w, y: (integrated(w, y), (w, y)), lambda saved, g: jax.vjp(_again, *saved)[1](g)
)


@pytest.mark.product("order")
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("order", ["amp(grad)", "grad(amp)"])
def test_a_derivative_takes_the_steps_that_the_solver_took(order: str, low: str) -> None:
    """Steps that are made again are accepted as they were; what they carry back is rounded."""
    rng = np.random.default_rng(0)
    w, y = jnp.float32(rng.normal(size=(8, 8))), jnp.float32(rng.normal(size=(4, 8)))

    def energy(w: jax.Array, y: jax.Array) -> jax.Array:
        return (integrated(w, y) ** 2).sum()

    exact = jax.grad(energy)(w, y)
    mixed = amp(jax.grad(energy), low) if order == "amp(grad)" else jax.grad(amp(energy, low))
    assert jnp.abs(mixed(w, y) - exact).max() < 0.03 * jnp.abs(exact).max()
    assert any(d.is_narrow for d in plan_of(jax.grad(energy), low)(w, y).decisions())


@pytest.mark.feature("cancellation")
@pytest.mark.parametrize("solve", [jnp.linalg.solve, lambda a, b: jnp.linalg.inv(a)])
def test_what_a_factorization_is_made_of_has_the_gradient_of_float32(solve: Program) -> None:
    """Products are float32 there; a solution lies where they cancel, and so do cotangents."""

    def energy(rows: jax.Array) -> jax.Array:
        return jnp.mean(solve(rows @ rows.T + 0.01 * jnp.eye(SIDE), INNER) ** 2)

    exact = jax.grad(energy)(SQUARE)
    off = jnp.abs(amp(jax.grad(energy))(SQUARE) - exact).max()
    assert off <= 1e-4 * jnp.abs(exact).max()


@jax.custom_jvp
def inverted(a: jax.Array) -> jax.Array:
    """Invert a matrix; its derivative multiplies by the inverse, where `jnp.linalg` solves."""
    return jnp.linalg.solve(a, jnp.eye(len(a)))


@inverted.defjvp
def _inverted(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    inverse = inverted(*primals)
    return inverse, -(inverse @ tangents[0] @ inverse)


@pytest.mark.feature("cancellation")
def test_differences_of_what_an_inverse_is_multiplied_by_are_not_rounded() -> None:
    """Trees that span a graph, by the matrix of its degrees less its edges: cotangents cancel."""

    def trees(w: jax.Array, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ w)
        scores = 4 * hidden @ hidden.T
        weights = jnp.exp(scores - scores.max())
        edges = weights * (1 - jnp.eye(len(x)))
        matrix = jnp.diag(edges.sum(0)) - edges
        inverse = inverted(matrix.at[0].set(edges[0] + jnp.diag(weights)))
        return jnp.sum(edges * (jnp.diag(inverse) - inverse.T) * scores)

    w, x = 4 * SQUARE, 12 * INNER[: SIDE - 4]
    exact = jax.grad(trees)(w, x)
    off = jnp.linalg.norm(amp(jax.grad(trees))(w, x) - exact)
    assert off < 0.03 * jnp.linalg.norm(exact)


@pytest.mark.parametrize("solve", [jnp.linalg.solve, lambda a, b: cho_solve(cho_factor(a), b)])
def test_steps_of_gauss_end_where_they_do_in_float32(solve: Program) -> None:
    """Four steps to a camera's place; a narrow residual is zero elsewhere."""
    points, shift = DRAW.normal(20, 3), jnp.float32([0.1, -0.2, 6.0])

    def seen(place: jax.Array) -> jax.Array:
        turn = jnp.eye(3) + jnp.cross(jnp.eye(3), place[:3])
        moved = points @ turn + place[3:]
        return (moved[:, :2] / moved[:, 2:]).ravel()

    def located(start: jax.Array, image: jax.Array) -> jax.Array:
        def step(place: jax.Array, _: None) -> tuple[jax.Array, None]:
            slopes, rest = jax.jacfwd(seen)(place), image - seen(place)
            return place + solve(slopes.T @ slopes, slopes.T @ rest), None

        return lax.scan(step, start, None, length=4)[0]

    image = seen(jnp.concatenate([jnp.full(3, 0.05), shift]))
    start = jnp.concatenate([jnp.zeros(3), shift + 0.2])
    assert jnp.abs(amp(located)(start, image) - located(start, image)).max() < 1e-5


def test_a_preconditioned_gradient_is_narrow() -> None:
    """A matrix for one axis of a layer's weights, which a step subtracts the solution from.

    It is made of what the layer's gradient multiplies, and as large as the cotangent.
    """

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2))(w)
        return w - jnp.linalg.solve(x.T @ x + jnp.eye(SIDE), gradient)

    decisions = plan_of(step)(SQUARE, FIELD[0, ..., 0]).decisions()
    layers = [d for d in decisions if d.primitive == "dot_general"][:5]
    assert [d.operand for d in layers] == [Precision.BF16] * 5


def test_weights_that_are_drawn_orthogonal_are_no_solution() -> None:
    """A whole run, from its initial weights on: all products of its steps read narrow numbers."""

    def run(key: jax.Array, x: jax.Array) -> jax.Array:
        def step(w: jax.Array, _: None) -> tuple[jax.Array, None]:
            gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2))(w)
            return w - 0.1 * gradient, None

        first = jax.nn.initializers.orthogonal()(key, (SIDE, SIDE))
        return lax.scan(step, first, None, length=3)[0]

    decisions = plan_of(run)(jax.random.key(0), FIELD[0, ..., 0]).decisions()
    products = [d.operand for d in decisions if d.primitive == "dot_general"]
    assert products == [Precision.BF16] * len(products) != []


def delta_rule(x: jax.Array, ws: jax.Array) -> jax.Array:
    """Keys and values that a state learns by the delta rule, in chunks of eight.

    See: Yang et al., "Parallelizing linear transformers with the delta rule over sequence length",
    arXiv:2406.06484.
    """
    q, k, v = (jnp.stack(jnp.split(x @ w, 4)) for w in ws)
    k = k * lax.rsqrt(jnp.sum(k * k, -1, keepdims=True) + 1e-6)
    lower = jnp.tril(k @ k.mT, -1)
    eye = jnp.broadcast_to(jnp.eye(x.shape[0] // 4), lower.shape)
    inverse = solve_triangular(lower + eye, eye, lower=True, unit_diagonal=True)

    def chunk(state: jax.Array, read: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, u, w = read
        new = u - w @ state
        return state + k.T @ new, q @ state + jnp.tril(q @ k.T) @ new

    reads = q, k, inverse @ v, inverse @ k
    return lax.scan(chunk, jnp.zeros((x.shape[1],) * 2), reads)[1].reshape(x.shape) @ ws[0]


@pytest.mark.parametrize("order", ["amp(f)", "amp(grad(f))"])
def test_a_recurrence_is_solved_and_no_matrix_is_factored(order: str) -> None:
    """A triangle with ones on its diagonal that no factorization made: all products are narrow.

    But for one of JAX's own in the derivative of the solve, which asks for its precision.
    """
    x, ws = jnp.asarray(DRAW.normal(4 * WIDTH, SIDE)), DRAW.normal(3, SIDE, SIDE, scale=0.25)
    program = delta_rule if order == "amp(f)" else jax.grad(lambda *a: (delta_rule(*a) ** 2).mean())
    products = [d for d in plan_of(program)(x, ws).decisions() if d.primitive == "dot_general"]
    assert {d.operand for d in products if not d.eqn.params["precision"]} == {Precision.BF16}


def test_a_factor_is_one_with_ones_on_its_diagonal_too() -> None:
    """As those of `jnp.linalg.solve` and `lu_solve`, whose products stay float32."""

    def solved(a: jax.Array, b: jax.Array) -> jax.Array:
        factors, _, permutation = lax.linalg.lu(a @ a.T + jnp.eye(SIDE))
        first = solve_triangular(factors, (b @ b)[permutation], lower=True, unit_diagonal=True)
        return first @ b

    decisions = plan_of(solved)(SQUARE, INNER).decisions()
    operands = [d.operand for d in decisions if d.primitive == "dot_general"]
    assert operands == [Precision.F32] * 3


POINTS = {
    "joined": lambda mean, off: jnp.concatenate([mean + off, mean - off]),
    "stacked": lambda mean, off: (mean + jnp.stack([off, -off])).reshape(-1, SIDE),
    "placed": lambda mean, off: jnp.tile(mean, (2 * SIDE, 1)).at[:SIDE].add(off),
    "chosen": lambda mean, off: jnp.where(jnp.arange(SIDE) < 3, mean, mean - off),
}


@pytest.mark.feature("cancellation")
@pytest.mark.parametrize("points", POINTS)
def test_cotangents_of_points_around_a_mean_are_not_rounded(points: str) -> None:
    """The weights of such points are large and of both signs: cotangents cancel in their sum."""

    def moved(x: jax.Array) -> jax.Array:
        at = POINTS[points](x[0], 0.01 * jnp.linalg.cholesky(x @ x.T + jnp.eye(SIDE)).T)
        weights = jnp.linspace(-999.0, 1001.0, len(at))[:, None]
        return ((weights * (at @ INNER)).sum(0) ** 2).sum()

    exact = jax.grad(moved)(SQUARE)
    assert jnp.abs(amp(jax.grad(moved))(SQUARE) - exact).max() <= 1e-4 * jnp.abs(exact).max()
