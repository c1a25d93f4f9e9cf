"""One number for each row of an array, given to every column by way of a flat array.

A softmax subtracts from each row its maximum, and divides by its sum. XLA:GPU computes such a group
in one kernel of tiles. Where a tile takes its rows from an axis that is not beside the rows' own,
as it does under a mask that all heads share, Triton moves numbers of rows between threads through
shared memory, and computes exponentials again rather than keep them, in more than twice the time.
It does neither where those numbers come from an array of one axis. The numbers are the same. Where
tiles do not divide an axis of rows, XLA would part the group at the flat array, and store in f32
what it had kept within a kernel: such a group stays as it is.

A softmax of transposed scores (`xla/transposed_layouts.py`) is no such kernel. A flat array would
have the scores transposed once more, in float32.

A group is changed when its equation is lowered, in forward and backward passes alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from functools import partial
from typing import Any

from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jaxamp.core import jax_compat
from jaxamp.jaxprs.interpret import bind_nested, evaluate
from jaxamp.jaxprs.nested import nested
from jaxamp.xla.transposed_layouts import find_transposed, is_elementwise, shape_of


def by_rows(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program that broadcasts numbers of rows from arrays of one axis.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> centred = jax.make_jaxpr(lambda x: x - x.max(-1, keepdims=True))(jnp.ones((2, 3, 8, 256)))
    >>> [eqn.primitive.name for eqn in by_rows(centred).jaxpr.eqns]
    ['reduce_max', 'broadcast_in_dim', 'reshape', 'broadcast_in_dim', 'reshape', 'sub']
    """
    return _changed(closed) if _reads_rows(closed) else closed


@jax_compat.remembered
def _reads_rows(closed: ClosedJaxpr) -> bool:
    columns = find_transposed(closed.jaxpr)
    return any(
        _read_by_rows(eqn, columns) or any(map(_reads_rows, _entered(eqn))) for eqn in closed.eqns
    )


@jax_compat.remembered
def _changed(closed: ClosedJaxpr) -> ClosedJaxpr:
    emit = partial(_emit, find_transposed(closed.jaxpr))

    def run(*args: Any) -> list[Any]:
        return evaluate(closed, args, emit)

    avals = [var.aval for var in closed.jaxpr.invars]
    return jax_compat.trace_to_jaxpr(run, avals, closed.jaxpr.debug_info)


def _emit(columns: Set[Var], eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    if bodies := _entered(eqn):
        return bind_nested(eqn, operands, map(by_rows, bodies))
    read = _read_by_rows(eqn, columns)
    if not read:
        return jax_compat.bind(eqn, operands)
    shape = shape_of(eqn.outvars[0])
    spread = [_spread(x, shape) if i in read else x for i, x in enumerate(operands)]
    is_spread = eqn.primitive is lax.broadcast_in_dim_p
    return spread if is_spread else jax_compat.bind(eqn, spread)


# Others are bound with rules of their own, or hold types of one device.
_ENTERED = frozenset({"jit", "scan", "while", "cond", "fused_group", "remat2"})


def _entered(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    return nested(eqn) if eqn.primitive.name in _ENTERED else []


def _spread(rows: Any, shape: tuple[int, ...]) -> Any:
    count = math.prod(shape[:-1])
    columns = lax.broadcast_in_dim(lax.reshape(rows, (count,)), (count, shape[-1]), (0,))
    return lax.reshape(columns, shape)


def _read_by_rows(eqn: JaxprEqn, columns: Set[Var]) -> list[int]:
    """Return which operands of an equation are repeated in each column."""
    if len(eqn.outvars) != 1 or not _has_rows(eqn.outvars[0]) or eqn.outvars[0] in columns:
        return []
    rows = shape_of(eqn.outvars[0])[:-1]
    if eqn.primitive is lax.broadcast_in_dim_p:
        onto, shape = map(int, eqn.params["broadcast_dimensions"]), shape_of(eqn.invars[0])
        return [0] if [*onto] == [*range(len(shape))] and shape in (rows, (*rows, 1)) else []
    if not is_elementwise(eqn):
        return []
    return [i for i, atom in enumerate(eqn.invars) if shape_of(atom) == (*rows, 1)]


def _has_rows(atom: Any) -> bool:
    """Return whether an array has columns, and rows of several axes, of which tiles take one.

    Of rows of two axes, such as the words of a batch, tiles take the last.
    """
    shape = shape_of(atom)
    if len(shape) < 4 or not all(isinstance(size, int) for size in shape) or shape[-1] < 2:
        return False
    return shape[-2] % _rows_of_a_tile(shape[-1]) == 0


_TILE = 2048  # numbers in XLA:GPU's tile of a softmax, as JAX 0.10 and 0.11 were seen to compile it


def _rows_of_a_tile(columns: int) -> int:
    """Return how many rows XLA may tile together: columns are padded to a power of two."""
    return max(2, _TILE >> (columns - 1).bit_length())
