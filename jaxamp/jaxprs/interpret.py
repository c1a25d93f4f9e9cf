"""The one walk through a jaxpr with an environment: values by variable, equation by equation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive

from jaxamp.core import jax_compat
from jaxamp.jaxprs.nested import Wiring, is_open, wiring, with_nested

Emit = Callable[[JaxprEqn, Sequence[Any]], Sequence[Any]]
Instead = Callable[[Sequence[Any]], Sequence[Any]]
Find = Callable[[JaxprEqn], Instead | None]


def walk(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    visit: Emit,
    literal: Callable[[Literal], Any] = jax_compat.literal_value,
) -> list[Any]:
    """Visit the equations of a jaxpr in order, with an environment of values of any kind.

    `visit` gets an equation and the values of its operands, and returns those of its results.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: 2.0 * jax.numpy.sin(x))(0.0).jaxpr
    >>> depth = lambda eqn, operands: [1 + max(operands)]
    >>> walk(jaxpr, (), [0], depth, lambda literal: 0)
    [2]
    """
    env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
    env.update(zip(jaxpr.constvars, consts, strict=True))

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [literal(a) if isinstance(a, Literal) else env[a] for a in atoms]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, visit(eqn, read(eqn.invars)), strict=True))
    return read(jaxpr.outvars)


def evaluate(closed: ClosedJaxpr, args: Sequence[Any], emit: Emit) -> list[Any]:
    """Run a jaxpr, each equation as the caller says, with its own source line and scope.

    >>> import jax
    >>> closed = jax.make_jaxpr(lambda x: 2.0 * x + 1.0)(0.0)
    >>> evaluate(closed, [3.0], jax_compat.bind)
    [Array(7., dtype=float32, weak_type=True)]
    """

    def visit(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
        with jax_compat.emitting(eqn):
            return emit(eqn, operands)

    return walk(closed.jaxpr, closed.consts, args, visit)


def emitted(closed: ClosedJaxpr, find: Find) -> ClosedJaxpr:
    """Return a program in which some equations are emitted otherwise; itself where there are none.

    `find` returns what emits an equation, given its operands; ``None`` where it stays as it is.
    """
    changes = list(map(find, closed.eqns))

    def run(*args: Any) -> list[Any]:
        remaining = iter(changes)

        def emit(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
            instead = next(remaining)
            return instead(operands) if instead else jax_compat.bind(eqn, operands)

        return evaluate(closed, args, emit)

    if not any(changes):
        return closed
    return jax_compat.trace_to_jaxpr(run, closed.in_avals, closed.jaxpr.debug_info)


def bind_nested(
    eqn: JaxprEqn, operands: Sequence[Any], bodies: Iterable[ClosedJaxpr], **changes: Any
) -> list[Any]:
    """Bind the primitive of an equation to other operands, with as many other jaxprs inside.

    Constants of one that replaces the open jaxpr of a call become its first operands.
    """
    bodies = list(bodies)
    if wiring(eqn) is Wiring.CALL and bodies[0].consts and is_open(eqn):
        (body,) = bodies
        operands = [*body.consts, *operands]
        bodies = [ClosedJaxpr(jax_compat.without_constvars(body.jaxpr), ())]
    return jax_compat.bind(eqn, operands, **with_nested(eqn, bodies), **changes)


def instead_of(
    primitive: Primitive, instead: Callable[[Sequence[Any], dict[str, Any]], Any]
) -> Emit:
    """Return an `emit` that replaces the equations of one primitive, and binds all others.

    `instead` gets operands and parameters, and returns the one result.
    """

    def emit(eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        if eqn.primitive is primitive:
            return [instead(values, eqn.params)]
        return jax_compat.bind(eqn, values)

    return emit
