"""What a program returns is read in float32 by all but Compute, and returned unrounded."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxamp import amp
from tests.programs.registry import Draw
from tests.tolerances import EPS

LOW = {"mixed_bf16": "bfloat16", "mixed_f16": "float16"}
DRAW = Draw("returned")
X, W, V = DRAW.normal(3, 32, 32, scale=32**-0.25)
M = 1500 + DRAW.normal(32)


def beside(x: jax.Array, w: jax.Array, v: jax.Array, m: jax.Array) -> Any:
    h = m + x @ w
    return (h - m) @ v, h


def reshaped(x: jax.Array, w: jax.Array, v: jax.Array, m: jax.Array) -> Any:
    h = m + x @ w
    return (h - m) @ v, {"prediction": h.T.reshape(-1)}


def in_a_branch(x: jax.Array, w: jax.Array, v: jax.Array, m: jax.Array) -> Any:
    h = lax.cond(x[0, 0] > 100, lambda: m + 0 * x, lambda: m + x @ w)
    return (h - m) @ v, h


def stacked(x: jax.Array, w: jax.Array, v: jax.Array, m: jax.Array) -> Any:
    def step(state: jax.Array, row: jax.Array) -> tuple[jax.Array, Any]:
        h = m + row @ w
        return state + (h - m) @ v, h

    return lax.scan(step, jnp.zeros((32, 32)), jnp.stack([x, 2 * x, 3 * x]))


def mapped(x: jax.Array, w: jax.Array, v: jax.Array, m: jax.Array) -> Any:
    out, h = jax.vmap(beside, in_axes=(0, None, None, None))(x[:, None], w, v, m)
    return out[:, 0], h


def product(x: jax.Array, w: jax.Array, v: jax.Array, m: jax.Array) -> Any:
    h = 1e-3 * m + x @ w
    scores = h @ w
    return (scores - lax.stop_gradient(scores) + x) @ v, scores


PROGRAMS = (beside, reshaped, in_a_branch, stacked, mapped, product)


def _far(found: Any, exact: Any) -> float:
    exact = np.float64(exact)
    return float(np.max(np.abs(np.float64(found) - exact)) / np.max(np.abs(exact)))


@pytest.mark.product("program")
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("program", PROGRAMS)
def test_differences_are_of_the_unrounded_result(program: Callable[..., Any], policy: str) -> None:
    """A rounded prediction near 1500 has lost what the network added."""
    found, exact = amp(program, policy)(X, W, V, M), program(X, W, V, M)
    assert _far(found[0], exact[0]) <= 4 * EPS[LOW[policy]]


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_not_rounded(program: Callable[..., Any], policy: str) -> None:
    """Beside products there is no rounding: most numbers have more bits than the format."""
    for leaf in jax.tree.leaves(amp(program, policy)(X, W, V, M)[1]):
        assert leaf.dtype == jnp.float32
        assert np.mean(leaf == leaf.astype(LOW[policy]).astype(jnp.float32)) < 0.5


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("around", ["grad(amp(f))", "amp(grad(f))"])
def test_a_prediction_may_be_an_auxiliary_output(around: str, policy: str) -> None:
    def loss(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, h = beside(X, w, V, M)
        return jnp.mean(out**2), h

    gradient = jax.value_and_grad(loss, has_aux=True)
    inside = jax.value_and_grad(amp(loss, policy), has_aux=True)
    mixed = amp(gradient, policy) if around == "amp(grad(f))" else inside
    (value, h), slope = mixed(W)
    (exact, _), exact_slope = gradient(W)
    eps = EPS[LOW[policy]]
    assert _far(value, exact) <= 4 * eps
    assert _far(slope, exact_slope) <= 8 * eps
    assert np.mean(h == h.astype(LOW[policy]).astype(jnp.float32)) < 0.5
