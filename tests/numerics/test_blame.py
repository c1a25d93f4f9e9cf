"""The search for the first infinity or NaN in loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxamp.training import explain_nonfinite


def test_a_finite_loop_is_run_as_a_whole():
    """A million iterations, none of which is to blame, take no longer than they do compiled."""

    def looped(x):
        x = jax.lax.fori_loop(0, 1_000_000, lambda _, x: jnp.sin(x), x)
        return jnp.log(x * 0)

    found = explain_nonfinite(looped)(jnp.float32(1))
    assert found is not None
    assert (found.primitive, found.iterations) == ("log", ())


def test_what_a_loop_threw_away_is_not_blamed():
    """One operation is infinite in two iterations; the first time nothing comes of it."""

    def body(carry, scale):
        large = jnp.exp(scale)
        return jnp.where(scale < 200, carry + large, carry), None

    def masked(x, scales):
        return jax.lax.scan(body, x, scales)[0]

    found = explain_nonfinite(masked)(jnp.float32(1), jnp.array([1.0, 300.0, 2.0, 150.0, 3.0]))
    assert found is not None
    assert (found.primitive, found.iterations, found.largest) == ("exp", (3,), 150.0)


@pytest.mark.parametrize(("bad", "last"), [(7, 200), (1999, 2000)])
def test_many_iterations(bad, last):
    """The iteration is told however many there are, and whatever they hand on."""

    def body(state):
        count, x, total = state
        y = jnp.cos(x) / (count - bad).astype(jnp.float32)
        total = jax.lax.cond(count % 2 == 0, lambda t: t + y, lambda t: t - y, total)
        return count + 1, jnp.tanh(x) + 1, total

    def looped(x):
        return jax.lax.while_loop(lambda state: state[0] < last, body, (0, x, x))[2]

    found = explain_nonfinite(looped)(jnp.float32(1))
    assert found is not None
    assert (found.primitive, found.kind, found.iterations) == ("div", "infinity", (bad,))


def test_a_number_from_outside_is_followed_into_loops():
    """What a loop was given is blamed on the input, through branches, calls and slices."""

    def body(carry, row):
        grown = jax.jit(lambda c: c * row)(carry)
        return jax.lax.cond(row > 0, lambda c: c + 1, lambda c: c, grown), grown

    def fun(x, rows):
        return jax.lax.scan(body, x, rows)

    found = explain_nonfinite(fun)(jnp.float32(1), jnp.array([1.0, jnp.inf, 2.0]))
    assert found is not None
    assert (found.primitive, found.kind, found.source) == ("input", "infinity", "rows")
