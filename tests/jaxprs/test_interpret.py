"""Programs that are walked compute what they did, and changes within them arrive."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr

from jaxamp.core import jax_compat
from jaxamp.jaxprs.interpret import bind_nested, evaluate, instead_of, walk
from jaxamp.jaxprs.nested import nested
from tests import table_programs

X = np.float32(0.3)


def cosines(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with cosines for sines, however deep they are."""

    def emit(eqn, operands):
        if eqn.primitive is lax.sin_p:
            return [lax.cos(*operands)]
        return bind_nested(eqn, operands, map(cosines, nested(eqn)))

    return jax.make_jaxpr(lambda *args: evaluate(closed, args, emit))(*closed.in_avals)


def looped(x):
    """A sine in a scan and in the test and body of a while loop."""
    x, _ = lax.scan(lambda c, y: (lax.sin(c * y), c), x, np.arange(3.0, dtype=np.float32))
    return lax.while_loop(lambda c: lax.sin(c) < 0.9, lambda c: c + lax.sin(c * c), x + 0.5)


PROGRAMS = {
    "jit": lambda f: jax.jit(f),
    "checkpoint": lambda f: jax.checkpoint(f),
    "branch": lambda f: lambda x: lax.cond(x > 0, f, lambda x: x, x),
    "nested": lambda f: jax.jit(jax.checkpoint(lambda x: 2 * jax.jit(f)(x))),
}


@pytest.mark.parametrize("wrap", PROGRAMS.values(), ids=PROGRAMS)
def test_what_is_nested_can_be_changed(wrap):
    changed = cosines(jax.make_jaxpr(wrap(lambda x: lax.sin(x) * X))(X))
    (result,) = evaluate(changed, [X], jax_compat.bind)
    np.testing.assert_array_equal(result, jax.jit(wrap(lambda x: lax.cos(x) * X))(X))


def test_loops_can_be_changed():
    """In both jaxprs of a while loop."""
    text = str(cosines(jax.make_jaxpr(looped)(X)))
    assert text.count("= cos") == str(jax.make_jaxpr(looped)(X)).count("= sin") == 3
    assert "= sin" not in text


def test_constants_of_an_open_jaxpr_become_operands():
    """A checkpoint holds no constants."""
    (eqn,) = jax.make_jaxpr(jax.checkpoint(lambda x: lax.sin(x)))(X).eqns
    table = jax.numpy.arange(3.0)
    body = jax.make_jaxpr(lambda x: x + table[0] * table.sum())(X)
    assert body.consts
    (result,) = jax.jit(lambda x: bind_nested(eqn, [x], [body]))(X)
    np.testing.assert_array_equal(result, X)


@pytest.mark.parametrize("name", ["calls", "control_flow", "nested"])
def test_a_walk_computes_what_the_program_does(name):
    fn, args = table_programs.PROGRAMS[name]
    closed = jax.make_jaxpr(fn)(*args)
    walked = jax.jit(lambda *given: evaluate(closed, given, jax_compat.bind))
    wanted = jax.tree.leaves(jax.jit(fn)(*args))
    for result, right in zip(walked(*jax.tree.leaves(args)), wanted, strict=True):
        np.testing.assert_array_equal(result, right)


def test_equations_keep_their_scope_and_line():
    @jax.jit
    def scoped(x):
        with jax.named_scope("layer"):
            return lax.sin(x)

    closed = jax.make_jaxpr(scoped)(X).eqns[0].params["jaxpr"]
    again = jax.make_jaxpr(lambda x: evaluate(closed, [x], jax_compat.bind))(X)
    (one,), (other,) = closed.eqns, again.eqns
    assert str(other.source_info.name_stack) == "layer"
    assert jax_compat.user_line(one.source_info) == jax_compat.user_line(other.source_info)


def test_what_is_bound_as_it_was_is_not_traced_again():
    """But for an operand of another type it is."""
    wave = jax.custom_jvp(lax.sin)
    wave.defjvps(lambda tangent, _, x: tangent * lax.cos(x))
    closed = jax.make_jaxpr(lambda x: wave(x) * x)(X)
    again, narrow = (
        jax.make_jaxpr(lambda x: evaluate(closed, [x], jax_compat.bind))(x)
        for x in (X, np.float16(X))
    )
    calls = [program.eqns[0].params["call_jaxpr"] for program in (closed, again, narrow)]
    assert calls[0] is calls[1] is not calls[2]
    assert narrow.out_avals[0].dtype == np.float16
    np.testing.assert_array_equal(evaluate(again, [X], jax_compat.bind), [jnp.sin(X) * X])


def test_one_primitive_can_be_replaced():
    closed = jax.make_jaxpr(lambda x: lax.sin(x) + lax.tanh(x))(X)
    emit = instead_of(lax.sin_p, lambda operands, params: lax.cos(*operands))
    (result,) = evaluate(closed, [X], emit)
    np.testing.assert_array_equal(result, lax.cos(X) + lax.tanh(X))


def test_a_walk_carries_values_of_any_kind() -> None:
    """Depths instead of arrays: of inputs, captured arrays and literals, through two results."""
    captured = jnp.arange(3.0)

    def program(x, y):
        largest, places = jax.lax.top_k(jnp.sin(x) * captured + 2.0, 2)
        return largest + y, places, x

    closed = jax.make_jaxpr(program)(captured, 1.0)
    visited = []

    def deeper(eqn, depths):
        visited.append(eqn)
        return [1 + max(depths, default=0)] * len(eqn.outvars)

    depths = walk(closed.jaxpr, [10] * len(closed.consts), [0, 0], deeper, lambda literal: -1)
    assert visited == list(closed.eqns)
    assert depths[1] == 13
    assert depths[0] > depths[1]
    assert depths[2] == 0
