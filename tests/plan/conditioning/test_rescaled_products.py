"""In float16, products that only a later operation brings into range; others are stored narrow."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import amp, plan_of
from jaxamp.core.formats import Precision
from tests.programs.registry import Draw
from tests.tolerances import CLASSES

ROWS, WIDTH = 32, 16
DRAW = Draw("rescaled products")
X = DRAW.normal(ROWS, WIDTH)
W = tuple(DRAW.weight(WIDTH, WIDTH) for _ in range(4))

Program = Callable[[jax.Array, tuple[jax.Array, ...]], jax.Array]


def softmax(scores: jax.Array) -> jax.Array:
    """As it is often written, with the derivative of a quotient."""
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return weights / weights.sum(-1, keepdims=True)


def attended(x: jax.Array, w: tuple[jax.Array, ...]) -> jax.Array:
    queries, keys, values = (x @ m for m in w[:3])
    return (softmax(queries @ keys.T) @ values) @ w[3]


def normalized_late(x: jax.Array, w: tuple[jax.Array, ...]) -> jax.Array:
    """The sums are up to 32 times 4,000."""
    weights = jnp.exp(jnp.tanh(x @ w[0] @ w[1].T @ x.T))
    values = 4000 + 300 * (x @ w[2])
    return ((weights @ values) / weights.sum(-1, keepdims=True) / 4000) @ w[3]


def cosines(x: jax.Array, w: tuple[jax.Array, ...]) -> jax.Array:
    """The products are up to 300 squared times 16."""
    queries, keys = 300 * jnp.tanh(x @ w[0]) + 200, 300 * jnp.tanh(x @ w[1]) + 200
    norms = [jnp.sqrt(jnp.sum(a**2, -1)) for a in (queries, keys)]
    return (queries @ keys.T / (norms[0][:, None] * norms[1])) @ (x @ w[2])


def rooted(x: jax.Array, w: tuple[jax.Array, ...]) -> jax.Array:
    """The sums of squares are up to 400,000."""
    squares = (50 * (x @ w[0])) ** 2
    return jnp.sqrt(squares @ jnp.abs(40 * w[1]) + 1) @ w[2] / 500


def divided(x: jax.Array, w: tuple[jax.Array, ...]) -> jax.Array:
    """Linear attention: the divisors are up to 500,000, and one by infinity is zero."""
    queries, keys = jnp.exp(x @ w[0]), 100 * jnp.exp(x @ w[1])
    return ((queries @ w[2]) * 1e4 / (2 * (queries @ keys.sum(0)) + 1)[:, None]) @ w[3]


def whitened(x: jax.Array, w: tuple[jax.Array, ...]) -> jax.Array:
    """The variances, on the diagonal of a product, are up to 500,000."""
    values = 100 * (x @ w[0])
    return (values / jnp.sqrt(jnp.diag(values.T @ values))) @ w[1]


def in_bands(x: jax.Array, w: tuple[jax.Array, ...]) -> jax.Array:
    """The powers of a tone of 1,024 samples, up to one, are up to a quarter of a million."""
    waves = jnp.fft.rfft(jnp.sin(x[:, :1] * jnp.arange(1024.0)))[:, :-1]
    return jnp.log(jnp.abs(waves) ** 2 @ jnp.abs(jnp.tile(w[0], (32, 1))) + 1) @ w[1]


PROGRAMS = [normalized_late, cosines, rooted, divided, whitened, in_bands]


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_brought_into_range_later_is_finite(program: Program) -> None:
    exact = np.asarray(program(X, W), np.float64)
    off = np.linalg.norm(np.float64(amp(program, "auto_mixed")(X, W)) - exact)
    assert off <= CLASSES["deep"] * jnp.finfo(jnp.float16).eps * np.linalg.norm(exact)


def test_cotangents_of_a_softmax_are_stored_narrow() -> None:
    """A cotangent that is divided by the sum of the weights is no sum of these weights."""

    def loss(w: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        return jnp.mean(attended(x, w) ** 2)

    decisions = plan_of(jax.grad(loss), "auto_mixed")(W, X).decisions()
    square = [
        d
        for d in decisions
        if d.primitive == "dot_general" and d.eqn.outvars[0].aval.shape == (ROWS, ROWS)
    ]
    assert [d.output for d in square] == [Precision.F16] * 2


def test_gram_matrices_whose_difference_is_squared_and_scaled_are_finite() -> None:
    """They are up to 800,000; what the next product reads is their difference times 1e-8."""

    def style(w: jax.Array, x: jax.Array) -> jax.Array:
        y = x @ w
        return 1e-6 * jnp.mean((y.T @ y - x.T @ x) ** 2)

    exact = np.asarray(jax.grad(style)(W[0], 150 * X), np.float64)
    off = np.linalg.norm(np.float64(amp(jax.grad(style), "auto_mixed")(W[0], 150 * X)) - exact)
    assert off <= CLASSES["deep"] * jnp.finfo(jnp.float16).eps * np.linalg.norm(exact)


def test_ways_to_later_products_are_not_walked_one_by_one() -> None:
    """Forty forks in a row are a million million ways."""

    def forked(x: jax.Array, w: tuple[jax.Array, ...]) -> jax.Array:
        hidden = x @ w[0]
        for _ in range(40):
            hidden = 1.5 * hidden - 1.25 * hidden
        return (hidden * 1e-9) @ w[1]

    first, *_, last = (d for d in plan_of(forked, "f16")(X, W).decisions() if "dot" in d.primitive)
    assert first.outputs == (Precision.F32,)
    assert last.operands == (Precision.F16, Precision.F16)
