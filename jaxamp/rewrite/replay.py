"""What JAX makes of an operation under a transform, emitted again with a primitive of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Primitive

from jaxamp import _compat


def replay(
    closed: ClosedJaxpr,
    operands: Sequence[Any],
    primitive: Primitive,
    instead: Callable[[Sequence[Any], dict[str, Any]], Any],
) -> list[Any]:
    """Emits a jaxpr, with another operation for each equation of a primitive.

    Args:
      closed: what was traced.
      operands: its arguments, of the shapes that it was traced with.
      primitive: of one result.
      instead: gets operands and parameters of its equations, and gives the result.
    """
    env: dict[Any, Any] = dict(zip(closed.jaxpr.invars, operands, strict=True))
    env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for eqn in closed.jaxpr.eqns:
        values = [_compat.read_atom(env, atom) for atom in eqn.invars]
        is_meant = eqn.primitive is primitive
        results = [instead(values, eqn.params)] if is_meant else _compat.bind(eqn, values)
        env.update(zip(eqn.outvars, results, strict=True))
    return [_compat.read_atom(env, atom) for atom in closed.jaxpr.outvars]
