"""What the search for the first infinity or NaN adds to a program, and what it remembers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxamp.numerics.nonfinite import Program
from jaxamp.training import explain_nonfinite

X = jnp.ones((4, 4))


def marked(fun: Any, *args: Any) -> tuple[Program, Any]:
    """The program of a function, and its marks as they are lowered."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    program = Program.of(jaxpr, None, [""] * len(args), [""] * len(jaxpr.out_avals))
    return program, jax.jit(program.marks).lower(*args)


def operations(lowered: Any) -> int:
    """How many operations a lowered program has."""
    return lowered.as_text().count(" = stablehlo.")


def straight(x, depth):
    """Layers one after another."""
    for _ in range(depth):
        x = jax.nn.gelu(x @ x) + x
    return x


def scanned(x, depth):
    """Layers in a loop."""
    return jax.lax.scan(lambda x, _: (straight(x, depth), None), x, length=3)[0]


def branched(x, depth):
    """Layers in the branch that is taken."""
    return jax.lax.cond(x[0, 0] > 0, lambda x: straight(x, depth), lambda x: x, x)


@pytest.mark.parametrize("fun", [straight, scanned, branched])
def test_each_operation_adds_a_few(fun):
    """The program that is compiled grows by a constant for each operation, and a small one."""
    extra, sites = [], []
    for depth in (5, 10, 20):
        program, lowered = marked(lambda x, depth=depth: fun(x, depth), X)
        plain = jax.jit(lambda x, depth=depth: fun(x, depth)).lower(X)
        extra.append(operations(lowered) - operations(plain))
        sites.append(len(program.sites))
    first = (extra[1] - extra[0]) / (sites[1] - sites[0])
    second = (extra[2] - extra[1]) / (sites[2] - sites[1])
    assert second < 1.1 * first
    assert second < 15


def test_a_long_sum_is_computed_once():
    """Partial sums of scalars are looked at as they come by: no compiler begins each anew."""
    args = [jnp.float32(i) for i in range(50)]
    program, lowered = marked(lambda *args: sum(args[1:], args[0]), *args)
    assert len(program.sites) == 49
    assert lowered.compile().as_text().count(" add(") < 2 * len(program.sites)


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


@pytest.mark.parametrize("bad", [7, 4999])
def test_thousands_of_iterations(bad):
    """The iteration is told however many there are, and whatever they hand on."""

    def body(state):
        count, x, total = state
        y = jnp.cos(x) / (count - bad).astype(jnp.float32)
        total = jax.lax.cond(count % 2 == 0, lambda t: t + y, lambda t: t - y, total)
        return count + 1, jnp.tanh(x) + 1, total

    def looped(x):
        return jax.lax.while_loop(lambda state: state[0] < 5000, body, (0, x, x))[2]

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
    assert (found.primitive, found.kind, found.source) == ("input", "infinity", "[0][1]")
