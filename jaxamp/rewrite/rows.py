"""One number for each row of an array, given to every column by way of a flat array.

A softmax subtracts from each row its maximum, and divides by its sum. XLA:GPU computes such a group
in one kernel of tiles. Where a tile takes its rows from an axis that is not beside the rows' own,
as it does under a mask that all heads share, Triton moves numbers of rows between threads through
shared memory, and computes exponentials again rather than keep them: three times the time. It does
neither where those numbers come from an array of one axis. The numbers are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from jaxamp import _compat
from jaxamp.taxonomy import OpKind, lookup


def by_rows(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr in which numbers of rows come from arrays of one axis.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> centred = jax.make_jaxpr(lambda x: x - x.max(-1, keepdims=True))(jnp.ones((2, 3, 4, 5)))
    >>> [eqn.primitive.name for eqn in by_rows(centred.jaxpr).eqns]
    ['reduce_max', 'broadcast_in_dim', 'reshape', 'broadcast_in_dim', 'reshape', 'sub']
    """
    if not any(_read_by_rows(eqn) or _is_of_rows(eqn) for eqn in jaxpr.eqns):
        return jaxpr

    def run(*args: Any) -> list[Any]:
        env = dict(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            operands = [_compat.read_atom(env, atom) for atom in eqn.invars]
            with _compat.emitting(eqn):
                env.update(zip(eqn.outvars, _emit(eqn, operands), strict=True))
        return [_compat.read_atom(env, atom) for atom in jaxpr.outvars]

    avals = [var.aval for var in jaxpr.invars]
    return _compat.trace_to_jaxpr(run, avals, jaxpr.debug_info).jaxpr


def _emit(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    shape = _shape(eqn.outvars[0])
    if _is_of_rows(eqn):
        return [_spread(operands[0], shape)]
    read = _read_by_rows(eqn)
    return _compat.bind(
        eqn, [_spread(x, shape) if i in read else x for i, x in enumerate(operands)]
    )


def _spread(rows: Any, shape: tuple[int, ...]) -> Any:
    count = math.prod(shape[:-1])
    columns = lax.broadcast_in_dim(lax.reshape(rows, (count,)), (count, shape[-1]), (0,))
    return lax.reshape(columns, shape)


def _read_by_rows(eqn: JaxprEqn) -> list[int]:
    """Which operands of an elementwise equation have one number for each row of the result."""
    described = lookup(eqn.primitive)
    if described is None or described.kind is not OpKind.ELEMENTWISE or not _has_rows(eqn):
        return []
    column = (*_shape(eqn.outvars[0])[:-1], 1)
    return [i for i, atom in enumerate(eqn.invars) if _shape(atom) == column]


def _is_of_rows(eqn: JaxprEqn) -> bool:
    """Whether this is a broadcast that adds columns and nothing else."""
    if eqn.primitive is not lax.broadcast_in_dim_p or not _has_rows(eqn):
        return False
    rows, shape = _shape(eqn.outvars[0])[:-1], _shape(eqn.invars[0])
    onto = [int(axis) for axis in eqn.params["broadcast_dimensions"]]
    return onto == [*range(len(shape))] and shape in (rows, (*rows, 1))


def _has_rows(eqn: JaxprEqn) -> bool:
    """Whether the result has columns, and rows of several axes, of which tiles take one.

    Of rows of two axes, such as the words of a batch, tiles take the last.
    """
    shape = _shape(eqn.outvars[0])
    return len(shape) > 3 and all(isinstance(size, int) for size in shape) and shape[-1] > 1


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())
