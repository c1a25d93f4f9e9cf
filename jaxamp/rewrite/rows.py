"""One number for each row of an array, given to every column by way of a flat array.

A softmax subtracts from each row its maximum, and divides by its sum. XLA:GPU computes such a group
in one kernel of tiles. Where a tile takes its rows from an axis that is not beside the rows' own,
as it does under a mask that all heads share, Triton moves numbers of rows between threads through
shared memory, and computes exponentials again rather than keep them, in more than twice the time.
It does neither where those numbers come from an array of one axis. The numbers are the same. Where
tiles do not divide an axis of rows, XLA would part the group at the flat array, and store in f32
what it had kept within a kernel: such a group stays as it is.

A softmax of scores that were transposed is no such kernel: XLA leaves the scores where they are,
so that a row's numbers are not side by side. A flat array would have them transposed in float32.

A group is changed when its checkpoint is lowered. Of the forward pass of `grad(amp(f))` JAX leaves
no checkpoint: so what `amp` has compiled is changed as a whole where it is lowered as a call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from functools import partial
from typing import Any

from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jaxamp import _compat
from jaxamp.rewrite.replay import replay
from jaxamp.taxonomy import OpKind, lookup


def by_rows(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program in which numbers of rows come from arrays of one axis.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> centred = jax.make_jaxpr(lambda x: x - x.max(-1, keepdims=True))(jnp.ones((2, 3, 8, 256)))
    >>> [eqn.primitive.name for eqn in by_rows(centred).jaxpr.eqns]
    ['reduce_max', 'broadcast_in_dim', 'reshape', 'broadcast_in_dim', 'reshape', 'sub']
    """
    return _changed(closed) if _reads_rows(closed) else closed


def _reads_rows(closed: ClosedJaxpr) -> bool:
    turned = _turned(closed.jaxpr)
    return any(
        _read_by_rows(eqn, turned) or any(map(_reads_rows, _bodies(eqn))) for eqn in closed.eqns
    )


@_compat.remembered
def _changed(closed: ClosedJaxpr) -> ClosedJaxpr:
    emit = partial(_emit, _turned(closed.jaxpr))

    def run(*args: Any) -> list[Any]:
        return replay(closed, args, emit)

    avals = [var.aval for var in closed.jaxpr.invars]
    return _compat.trace_to_jaxpr(run, avals, closed.jaxpr.debug_info)


def _emit(turned: Set[Var], eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    with _compat.emitting(eqn):
        if bodies := _bodies(eqn):
            return _compat.bind(eqn, operands, **_holding(eqn, map(by_rows, bodies)))
        read = _read_by_rows(eqn, turned)
        if not read:
            return _compat.bind(eqn, operands)
        shape = _shape(eqn.outvars[0])
        spread = [_spread(x, shape) if i in read else x for i, x in enumerate(operands)]
        is_spread = eqn.primitive is lax.broadcast_in_dim_p
        return spread if is_spread else _compat.bind(eqn, spread)


# What a call, loop or branch computes, by the name of its parameter.
_BODIES = {
    "jit": "jaxpr",
    "scan": "jaxpr",
    "while": "body_jaxpr",
    "cond": "branches",
    "remat2": "jaxpr",
}


def _bodies(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    name = _BODIES.get(eqn.primitive.name)
    held = eqn.params[name] if name else ()
    held = held if isinstance(held, tuple) else (held,)
    return [h if isinstance(h, ClosedJaxpr) else ClosedJaxpr(h, ()) for h in held]


def _holding(eqn: JaxprEqn, bodies: Iterable[ClosedJaxpr]) -> dict[str, Any]:
    """The parameter that holds these bodies, closed or open as it was."""
    name = _BODIES[eqn.primitive.name]
    held = eqn.params[name]
    if isinstance(held, tuple):
        return {name: tuple(bodies)}
    (body,) = bodies
    if isinstance(held, ClosedJaxpr):
        return {name: body}
    return {name: held if body.consts else body.jaxpr}  # an open one cannot hold constants


def _spread(rows: Any, shape: tuple[int, ...]) -> Any:
    count = math.prod(shape[:-1])
    columns = lax.broadcast_in_dim(lax.reshape(rows, (count,)), (count, shape[-1]), (0,))
    return lax.reshape(columns, shape)


# What these give is in memory as their operands are.
_THROUGH = ("add_any", "convert_element_type", "held", "name")


def _turned(jaxpr: Jaxpr) -> Set[Var]:
    """Arrays whose rows were columns: transposed ones, and what arithmetic joins to these."""
    parent: dict[Var, Var] = {}

    def root(var: Var) -> Var:
        while parent.setdefault(var, var) is not var:
            parent[var] = var = parent[parent[var]]
        return var

    transposed = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is lax.transpose_p:
            if eqn.params["permutation"][-1] != len(eqn.params["permutation"]) - 1:
                transposed += eqn.outvars
        elif _is_elementwise(eqn) or eqn.primitive.name in _THROUGH or _bodies(eqn):
            first: dict[tuple[int, ...], Var] = {}
            for atom in (*eqn.invars, *eqn.outvars):
                if isinstance(atom, Var) and _has_rows(atom):
                    parent[root(atom)] = root(first.setdefault(_shape(atom), atom))
    roots = set(map(root, transposed))
    return {var for var in parent if root(var) in roots}


def _is_elementwise(eqn: JaxprEqn) -> bool:
    described = lookup(eqn.primitive)
    return described is not None and described.kind is OpKind.ELEMENTWISE


def _read_by_rows(eqn: JaxprEqn, turned: Set[Var]) -> list[int]:
    """Which operands of a broadcast or of elementwise arithmetic are repeated in each column."""
    if len(eqn.outvars) != 1 or not _has_rows(eqn.outvars[0]) or eqn.outvars[0] in turned:
        return []
    rows = _shape(eqn.outvars[0])[:-1]
    if eqn.primitive is lax.broadcast_in_dim_p:
        onto, shape = map(int, eqn.params["broadcast_dimensions"]), _shape(eqn.invars[0])
        return [0] if [*onto] == [*range(len(shape))] and shape in (rows, (*rows, 1)) else []
    if not _is_elementwise(eqn):
        return []
    return [i for i, atom in enumerate(eqn.invars) if _shape(atom) == (*rows, 1)]


def _has_rows(atom: Any) -> bool:
    """Whether an array has columns, and rows of several axes, of which tiles take one.

    Of rows of two axes, such as the words of a batch, tiles take the last.
    """
    shape = _shape(atom)
    if len(shape) < 4 or not all(isinstance(size, int) for size in shape) or shape[-1] < 2:
        return False
    return shape[-2] % _rows_of_a_tile(shape[-1]) == 0


_TILE = 2048  # numbers in XLA:GPU's tile of a softmax, as JAX 0.10 and 0.11 were seen to compile it


def _rows_of_a_tile(columns: int) -> int:
    """How many rows XLA may want to take at a time: columns are padded to a power of two."""
    return max(2, _TILE >> (columns - 1).bit_length())


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())
