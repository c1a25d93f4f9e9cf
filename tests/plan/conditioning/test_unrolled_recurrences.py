"""Recurrences that are written out: what they carry is rounded as little as a loop's carry."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import amp, plan_of
from jaxamp.core.formats import is_narrow
from tests.numerics.oracle import products_rounded
from tests.programs.registry import Draw

TURNS, ROWS, WIDTH = 20, 4, 8
DRAW = Draw("unrolled recurrences")
X = DRAW.normal(TURNS, ROWS, WIDTH)
W, U, OUT = (DRAW.weight(WIDTH, WIDTH) for _ in range(3))

Turn = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def gated(w: jax.Array, h: jax.Array, x: jax.Array) -> jax.Array:
    keep = jax.nn.sigmoid((h @ U + x @ w) / 3 + 4)
    return keep * h + (1 - keep) * jnp.tanh(x @ w)


def stepped(w: jax.Array, h: jax.Array, x: jax.Array) -> jax.Array:
    """Euler's method, of which a step is less than a rounding."""
    return h + 0.01 * jnp.tanh((h + x) @ w)


def midpoint(w: jax.Array, h: jax.Array, x: jax.Array) -> jax.Array:
    half = h + 0.005 * jnp.tanh(jnp.tanh(h @ w) @ U)
    return h + 0.01 * jnp.tanh(jnp.tanh(half @ w) @ U)


def parted(w: jax.Array, h: jax.Array, x: jax.Array) -> jax.Array:
    """A part of an array is cut out in each turn."""
    return h + 0.01 * jnp.tanh((h + x)[:, 1:] @ w[1:])


def summed(w: jax.Array, h: jax.Array, x: jax.Array) -> jax.Array:
    """What is added is not made of the sum, as in linear attention."""
    return h + 0.2 * (x @ w)


def written_out(turn: Turn, w: jax.Array, x: jax.Array) -> jax.Array:
    h, read = jnp.tanh(x[0] @ OUT), 0.0
    for part in x:
        h = turn(w, h, part)
        read += jnp.mean((h @ OUT) ** 2)
    return jnp.asarray(read)


@pytest.mark.product("turn", every=3)
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize("turn", [gated, stepped, midpoint, parted, summed])
def test_what_is_carried_is_not_rounded(turn: Turn, order: str) -> None:
    fn = partial(written_out, turn)
    exact = jax.jit(jax.grad(fn))(W, X)
    rounded = jax.jit(products_rounded(jax.grad(fn), jnp.bfloat16))(W, X)
    mixed = amp(jax.grad(fn)) if order == "amp(grad(f))" else jax.grad(amp(fn))
    allowed = 3 * np.linalg.norm(rounded - exact)
    assert 0 < np.linalg.norm(jax.jit(mixed)(W, X) - exact) <= allowed


def layers(ws: jax.Array, x: jax.Array) -> jax.Array:
    """As many turns, each with a matrix of its own: a residual stream."""
    h = x @ OUT
    for w in ws:
        h = h + jnp.tanh((h @ w) @ U)
    return jnp.mean((h @ OUT) ** 2)


def views(ws: jax.Array, x: jax.Array) -> jax.Array:
    """A matrix that is used as often, and no turn follows from another."""
    h = jnp.tanh(x @ OUT) + x @ U
    errors = [jnp.mean((jnp.tanh((h * jnp.cos(w[0])) @ W) @ OUT) ** 2) for w in ws]
    return jnp.mean(jnp.stack(errors))


@pytest.mark.parametrize("model", [layers, views])
def test_what_follows_from_no_equal_turn_is_narrow(model: Callable[..., jax.Array]) -> None:
    ws = Draw("turns").normal(TURNS, WIDTH, WIDTH)
    for fn in (model, jax.grad(model)):
        decisions = list(plan_of(fn)(ws, X[0]).decisions())
        made = [d for d in decisions if d.primitive != "dot_general"]
        assert sum(is_narrow(d.output) for d in made) >= TURNS


def test_what_is_weighed_in_many_levels_is_not_rounded_in_each() -> None:
    """A recurrence by prefix sums in log space (Feng et al. 2024): cotangents nearly cancel."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        gate, new = x @ w, x @ U
        kept = jnp.cumsum(jax.nn.log_sigmoid(-gate), 0)
        state = kept + jax.lax.cumlogsumexp(jax.nn.log_sigmoid(gate) + new - kept)
        return jnp.mean((jnp.exp(state) @ OUT) ** 2)

    decisions = list(plan_of(jax.grad(loss))(W, X[:, 0]).decisions())
    assert not [d for d in decisions if d.primitive == "pad" and is_narrow(d.output)]
    assert not [d for d in decisions if d.primitive == "exp" and is_narrow(d.output)]
