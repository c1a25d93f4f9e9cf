"""Equations that nothing needs are found, through what holds them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxamp.inspect.dce import Live, live_equations
from jaxamp.jaxprs.nested import nested

X = jnp.ones(3)


def pair(x, y):
    return jnp.sin(x), jnp.cos(y)


def through(wrap):
    """A program that needs the first result of a pair alone: its own operand is computed too."""

    def program(x):
        return wrap(jnp.exp(x), jnp.log(x))[0]

    return jax.make_jaxpr(program)(X).jaxpr


WRAPS = {
    "jit": jax.jit(pair),
    "checkpoint": jax.checkpoint(pair),
    "branch": lambda x, y: lax.cond(X[0] > 0, pair, lambda x, y: (x, y), x, y),
    "scan": lambda x, y: lax.scan(lambda c, _: (pair(*c), None), (x, y), length=2)[0],
}


def live_names(jaxpr, needed):
    """The primitives of the equations that are needed."""
    return {eqn.primitive.name for eqn, is_live, _ in Live().walk(jaxpr, needed) if is_live}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_what_only_an_unneeded_result_needs_is_dead(wrap):
    jaxpr = through(wrap)
    assert {"exp", "log"} & live_names(jaxpr, [True]) == {"exp"}
    ((holder, needed),) = (
        (eqn, needed) for eqn, _, needed in Live().walk(jaxpr, [True]) if nested(eqn)
    )
    inside = live_names(nested(holder)[-1].jaxpr, needed)
    assert {"sin", "cos"} & inside == {"sin"}


def test_a_carry_that_a_needed_one_reads_is_live():
    """In the next iteration, and in the one after that."""

    def step(carry, _):
        a, b, c, d = carry
        return (a + b, b + c, jnp.sin(c), jnp.cos(d)), None

    program = jax.make_jaxpr(lambda x: lax.scan(step, (x, x, x, x), length=3)[0][0])(X)
    ((_, _, needed),) = Live().walk(program.jaxpr, [True])
    assert needed == [True, True, True, False]


def test_loops_of_unknown_length_and_effects_need_all_they_read():
    def program(x):
        jax.debug.print("{}", jnp.exp(x))
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))[0]

    jaxpr = jax.make_jaxpr(program)(X).jaxpr
    assert all(is_live for _, is_live, _ in Live().walk(jaxpr, [True]))


def test_one_level_takes_a_call_to_need_all_operands():
    jaxpr = through(jax.jit(pair))
    assert live_equations(jaxpr) == [True, True, True]
    unused = jax.make_jaxpr(lambda x: (jnp.exp(x), jnp.log(x))[0])(X).jaxpr
    assert live_equations(unused) == [True, False]
