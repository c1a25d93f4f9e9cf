"""What JAX made of a program, emitted again with something of ours in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive

from jaxamp.core import jax_compat

Emit = Callable[[JaxprEqn, Sequence[Any]], Sequence[Any]]


def replay(closed: ClosedJaxpr, operands: Sequence[Any], emit: Emit) -> list[Any]:
    """Emits a jaxpr, each equation in a way of the caller's.

    Args:
      closed: what was traced.
      operands: its arguments, of the shapes that it was traced with.
      emit: gets an equation and its operands, and gives its results.
    """
    env: dict[Any, Any] = dict(zip(closed.jaxpr.invars, operands, strict=True))
    env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for eqn in closed.jaxpr.eqns:
        values = [jax_compat.read_atom(env, atom) for atom in eqn.invars]
        env.update(zip(eqn.outvars, emit(eqn, values), strict=True))
    return [jax_compat.read_atom(env, atom) for atom in closed.jaxpr.outvars]


def instead_of(
    primitive: Primitive, instead: Callable[[Sequence[Any], dict[str, Any]], Any]
) -> Emit:
    """Emits another operation for each equation of a primitive, and the others as they are.

    Args:
      primitive: of one result.
      instead: gets operands and parameters of its equations, and gives the result.
    """

    def emit(eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        if eqn.primitive is primitive:
            return [instead(values, eqn.params)]
        return jax_compat.bind(eqn, values)

    return emit
