"""Positional encodings of what a network has made, which takes the coordinates themselves too."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxamp import amp, plan_of
from jaxamp.core.formats import Precision
from tests.numerics.oracle import products_rounded
from tests.programs.registry import Draw

ROWS, WIDTH, BANDS = 128, 3, 6
LOW = {"auto_mixed_bf16": jnp.bfloat16, "auto_mixed": jnp.float16}
DRAW = Draw("periodic arguments")
X = DRAW.uniform(ROWS, WIDTH, low=-1)
W = DRAW.normal(WIDTH, WIDTH)
OUT = DRAW.normal(WIDTH * (1 + 2 * BANDS), WIDTH)

Encoding = Callable[[jax.Array], jax.Array]


def at_once(p: jax.Array) -> jax.Array:
    phases = (p[:, None] * 2.0 ** jnp.arange(BANDS)[:, None]).reshape(p.shape[0], -1)
    return jnp.concatenate([p, jnp.sin(phases), jnp.cos(phases)], -1)


def one_by_one(p: jax.Array) -> jax.Array:
    phases = [2.0**k * p for k in range(BANDS)]
    return jnp.concatenate([p, *map(jnp.sin, phases), *map(jnp.cos, phases)], -1)


def by_wavelength(p: jax.Array) -> jax.Array:
    """In blocks of rows, by a loop."""

    def block(p: jax.Array) -> jax.Array:
        phases = (p[..., None] / 0.5 ** jnp.arange(BANDS) + 1).reshape(len(p), -1)
        return jnp.concatenate([p, jnp.sin(phases), jnp.cos(phases)], -1)

    return lax.map(block, p.reshape(4, -1, WIDTH)).reshape(ROWS, -1)


ENCODINGS: dict[str, Encoding] = {
    "at_once": at_once,
    "one_by_one": one_by_one,
    "by_wavelength": by_wavelength,
}


@pytest.mark.product("name")
@pytest.mark.parametrize(
    ("policy", "order"), [("auto_mixed_bf16", "grad(amp(f))"), ("auto_mixed", "amp(grad(f))")]
)
@pytest.mark.parametrize("name", ENCODINGS)
def test_what_is_encoded_is_not_rounded(name: str, policy: str, order: str) -> None:
    """The warp of a deformable scene: its encoding is as exact as its products."""

    def loss(out: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(ENCODINGS[name](x + jnp.tanh(x @ W) / 10) @ out) ** 2)

    exact = jax.jit(jax.grad(loss))(OUT, X)
    rounded = jax.jit(products_rounded(jax.grad(loss), LOW[policy]))(OUT, X)
    mixed = amp(jax.grad(loss), policy) if order == "amp(grad(f))" else jax.grad(amp(loss, policy))
    allowed = 2 * np.linalg.norm(rounded - exact)
    assert 0 < np.linalg.norm(jax.jit(mixed)(OUT, X) - exact) <= allowed


def test_rows_may_be_symbolic() -> None:
    """Of any number of rows, a coordinate is known to be smaller than its encoding."""

    def warped(x: jax.Array) -> jax.Array:
        return at_once(x + jnp.tanh(x @ W) / 10) @ OUT

    (rows,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    (coordinate,) = [d for d in plan_of(warped)(x).decisions() if d.primitive == "add"]
    assert coordinate.output is Precision.F32


def test_a_periodic_activation_is_narrow() -> None:
    """`snake`: each number has one frequency, which has been learned."""

    def snakes(frequency: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ W + x @ W.T
        return (h + jnp.sin(frequency * h) ** 2 / frequency) @ W + h @ W.T

    sums = [d for d in plan_of(snakes)(jnp.ones(WIDTH), X).decisions() if d.primitive == "add"]
    assert [d.output for d in sums[:2]] == [Precision.BF16] * 2
