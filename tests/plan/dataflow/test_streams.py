"""Residual streams that begin with rows of a table, as in a language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxamp import Precision, amp, plan_of
from tests.programs.registry import Draw

ROWS, WORDS, WIDTH = 512, 64, 32
DRAW = Draw("streams of rows")
TABLE = DRAW.normal(ROWS, WIDTH)
W = DRAW.normal(2, WIDTH, WIDTH, scale=WIDTH**-0.5)
WORD = DRAW.integers(ROWS, WORDS)

Begins = Callable[[jax.Array], jax.Array]


def norm(x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)


def layers(begins: Begins) -> Callable[..., jax.Array]:
    def run(table: jax.Array, w: jax.Array, words: jax.Array) -> jax.Array:
        x = begins(table[words])
        x = x + jnp.tanh(norm(x) @ w[0])
        return jnp.mean((norm(x) @ w[1]) ** 2)

    return run


def rows(x: jax.Array) -> jax.Array:
    return x


def scaled(x: jax.Array) -> jax.Array:
    return x * WIDTH**0.5 + jnp.arange(1.0, WIDTH + 1) / WIDTH


def masked(x: jax.Array) -> jax.Array:
    return jnp.where(x[:, :1] > 0, scaled(x), 0.0)


def outputs(fn: Callable[..., Any], name: str, size: int) -> list[Precision | None]:
    """What the equations of a name and size store."""
    decisions = plan_of(fn, "mixed_bf16")(TABLE, W, WORD).decisions()
    avals: list[tuple[Any, Any]] = [
        (d, d.eqn.outvars[0].aval) for d in decisions if d.primitive == name
    ]
    return [d.output for d, aval in avals if aval.size == size]


@pytest.mark.parametrize(
    ("begins", "name"), [(rows, "gather"), (scaled, "add"), (masked, "select_n")]
)
def test_what_begins_a_stream_is_stored_narrow(begins: Begins, name: str) -> None:
    """The norm reads it, and after the layer a sum, which is rounded in any case."""
    assert outputs(layers(begins), name, WORDS * WIDTH)[0] is Precision.BF16


def distances(table: jax.Array, w: jax.Array, words: jax.Array) -> jax.Array:
    """Places, which are moved by what a product makes of their differences."""
    x = table[words]
    near = x - table[words[::-1]]
    x = x + jnp.tanh(near @ w[0])
    return jnp.mean((x @ w[1]) ** 2)


def read_once(table: jax.Array, w: jax.Array, words: jax.Array) -> jax.Array:
    """Rows that the later kernel alone reads: it looks them up."""
    h = jnp.tanh(table[words[::-1]] @ w[0])
    return jnp.mean((norm(table[words] + h) @ w[1]) ** 2)


def of_few_rows(table: jax.Array, w: jax.Array, words: jax.Array) -> jax.Array:
    """Rows that many words have in common, as chemical elements: their roundings add up."""
    return layers(rows)(table[:WIDTH], w, words % WIDTH)


@pytest.mark.parametrize("other", [distances, read_once, of_few_rows])
def test_other_rows_stay_as_they_are(other: Callable[..., Any]) -> None:
    found = outputs(other, "gather", WORDS * WIDTH)
    assert found
    assert Precision.BF16 not in found


@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize("begins", [rows, scaled, masked])
def test_no_less_accurate_than_by_hand(begins: Begins, order: str) -> None:
    """By hand the table is rounded before anything is looked up in it."""
    fn = layers(begins)

    def by_hand(table: jax.Array, w: jax.Array, words: jax.Array) -> jax.Array:
        low = jnp.bfloat16
        x = begins(table.astype(low)[words]).astype(low)
        for i in (0, 1):
            y = norm(x.astype(jnp.float32)).astype(low) @ w[i].astype(low)
            x = x + jnp.tanh(y) if i == 0 else y
        return jnp.mean(x.astype(jnp.float32) ** 2)

    grad = jax.grad(amp(fn, "bf16")) if order == "grad(amp(f))" else amp(jax.grad(fn), "bf16")
    exact, hand, found = (g(TABLE, W, WORD) for g in (jax.grad(fn), jax.grad(by_hand), grad))
    error, allowed = (jnp.abs(g - exact).max() / jnp.abs(exact).max() for g in (found, hand))
    assert error <= allowed
