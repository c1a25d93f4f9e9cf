"""Recurrences that forget slowly: a rounding of what a carry keeps is raised to a power."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxamp import amp, plan_of
from jaxamp.core.formats import Precision, is_narrow
from tests.numerics.oracle import products_rounded
from tests.programs.registry import Draw

TURNS, ROWS, WIDTH = 200, 4, 8
LOW = {"auto_mixed_bf16": jnp.bfloat16, "auto_mixed": jnp.float16}
DRAW = Draw("forget gates")
X = DRAW.normal(TURNS, ROWS, WIDTH)
W, GATE, OUT = (DRAW.weight(WIDTH, WIDTH) for _ in range(3))
KEEPS = np.linspace(4, 7, WIDTH).astype("f")  # sigmoids of these are between 0.98 and 0.999

Recurrence = Callable[[jax.Array, jax.Array], jax.Array]


def gated(w: jax.Array, x: jax.Array) -> jax.Array:
    """The gate is computed before the loop, which goes through it."""
    keep = jax.nn.sigmoid(x @ w / 3 + KEEPS)

    def turn(h: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        keep, new = part
        return keep * h + (1 - keep) * new, None

    return lax.scan(turn, jnp.zeros((ROWS, WIDTH)), (keep, x @ GATE))[0]


def gru(w: jax.Array, x: jax.Array) -> jax.Array:
    """The gate is computed in the loop, and a loop of cotangents reads it."""

    def turn(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        keep = jax.nn.sigmoid((h @ GATE + x @ w) / 3 + KEEPS)
        return (1 - keep) * jnp.tanh(x @ GATE + h @ w) + keep * h, None

    return lax.scan(turn, jnp.zeros((ROWS, WIDTH)), x)[0]


def masked(w: jax.Array, x: jax.Array) -> jax.Array:
    """What is chosen from, broadcast and multiplied is part of the decay."""
    decay = jnp.exp(-jax.nn.softplus(x @ w / 3 - KEEPS))

    def turn(s: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        decay, k, v = part
        decay = jnp.where(k[:, :1] > 3, 0, decay)[..., None]
        return decay * s + k[..., None] * v[:, None], None

    s, _ = lax.scan(turn, jnp.zeros((ROWS, WIDTH, WIDTH)), (decay, x @ GATE, x @ OUT))
    return jnp.sum(s, 1)


RECURRENCES: dict[str, Recurrence] = {"gated": gated, "gru": gru, "masked": masked}


@pytest.mark.product
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", RECURRENCES)
def test_what_is_forgotten_slowly_is_forgotten(name: str, policy: str) -> None:
    def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.mean((RECURRENCES[name](w, x) @ OUT) ** 2))(w)

    exact = jax.jit(gradient)(W, X)
    rounded = jax.jit(products_rounded(gradient, LOW[policy]))(W, X)
    allowed = 3 * np.linalg.norm(rounded - exact)
    assert 0 < np.linalg.norm(jax.jit(amp(gradient, policy))(W, X) - exact) <= allowed


def test_what_is_added_to_a_carry_is_narrow() -> None:
    """Only what multiplies it has to be float32."""
    gradient = jax.grad(lambda w, x: jnp.mean((gated(w, x) @ OUT) ** 2))
    decisions = list(plan_of(gradient)(W, X).decisions())
    (gate,) = [d for d in decisions if d.primitive == "logistic"]
    assert gate.output is Precision.F32
    (loop, *_) = [d for d in decisions if d.primitive == "scan"]
    assert sum(is_narrow(p) for p in loop.operands) == 1
