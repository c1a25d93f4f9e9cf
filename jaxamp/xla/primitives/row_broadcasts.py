"""Broadcast numbers of rows from a flat array, in programs for one GPU.

A softmax subtracts from each row its maximum, and divides by its sum. XLA:GPU computes it in one
kernel of tiles. Where a tile takes its rows from an axis that is not beside the rows' own, as under
a mask that all heads share, Triton moves numbers of rows between threads through shared memory, and
recomputes exponentials, which takes more than twice the time. It does neither where those numbers
are broadcast from an array of one axis. The results are the same. Where tiles do not divide the
axis of rows, XLA would split the group at the flat array, and store in float32 what it had kept
within a kernel: such a group is left as it is. So is a softmax of transposed scores
(`find_transposed`): a flat array would have the scores transposed once more, in float32.

A group is changed when its equation is lowered, in forward and backward passes alike.

See: docs/lab-notebook.md for the times, JAX 0.10.2 on an H200.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence, Set
from functools import partial
from itertools import pairwise
from typing import Any

from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import is_by_element
from jaxamp.jaxprs.interpret import Instead, emitted
from jaxamp.jaxprs.nested import nested
from jaxamp.plan.graph.consumers import closure


@jax_compat.kept_with
def flatten_row_broadcasts(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program that broadcasts numbers of rows from arrays of one axis.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> centred = jax.make_jaxpr(lambda x: x - x.max(-1, keepdims=True))(jnp.ones((2, 3, 8, 256)))
    >>> [eqn.primitive.name for eqn in flatten_row_broadcasts(centred).jaxpr.eqns]
    ['reduce_max', 'broadcast_in_dim', 'reshape', 'broadcast_in_dim', 'reshape', 'sub']
    """
    find = partial(_find, find_transposed(closed.jaxpr))
    return emitted(closed, find)


def _find(columns: Set[Var], eqn: JaxprEqn) -> Instead | None:
    read = _row_operands(eqn, columns)
    return partial(_emit, eqn, read) if read else None


def _emit(eqn: JaxprEqn, read: Sequence[int], operands: Sequence[Any]) -> list[Any]:
    shape = _shape_of(eqn.outvars[0])
    spread = [_broadcast_flat(x, shape) if i in read else x for i, x in enumerate(operands)]
    is_spread = eqn.primitive is lax.broadcast_in_dim_p
    return spread if is_spread else jax_compat.bind(eqn, spread)


def _broadcast_flat(rows: Any, shape: tuple[int, ...]) -> Any:
    count = math.prod(shape[:-1])
    columns = lax.broadcast_in_dim(lax.reshape(rows, (count,)), (count, shape[-1]), (0,))
    return lax.reshape(columns, shape)


def _row_operands(eqn: JaxprEqn, columns: Set[Var]) -> list[int]:
    """Return the operands of an equation that are broadcast along rows, by index."""
    if len(eqn.outvars) != 1 or not _has_rows(eqn.outvars[0]) or eqn.outvars[0] in columns:
        return []
    rows = _shape_of(eqn.outvars[0])[:-1]
    if eqn.primitive is lax.broadcast_in_dim_p:
        onto, shape = map(int, eqn.params["broadcast_dimensions"]), _shape_of(eqn.invars[0])
        return [0] if [*onto] == [*range(len(shape))] and shape in (rows, (*rows, 1)) else []
    if not is_by_element(eqn.primitive):
        return []
    return [i for i, atom in enumerate(eqn.invars) if _shape_of(atom) == (*rows, 1)]


def _has_rows(atom: Any) -> bool:
    """Return whether an array has rows along several axes, of which a tile takes one.

    With two axes of rows, such as the tokens of a batch, it takes the last.
    """
    shape = _shape_of(atom)
    if len(shape) < 4 or not all(isinstance(size, int) for size in shape) or shape[-1] < 2:
        return False
    rows = max(2, _TILE >> (shape[-1] - 1).bit_length())  # columns are padded to a power of two
    return shape[-2] % rows == 0


# Elements of XLA:GPU's tile of a softmax, as read from the kernels that JAX 0.10.2 and 0.11 compile
# for an H200: `python -m benchmarks.deviceless --target h200 --model transformer --dump out`.
_TILE = 2048


def find_transposed(jaxpr: Jaxpr) -> Set[Var]:
    """Find the arrays of more than three axes that XLA:GPU leaves in a transposed layout.

    It makes no copy of a transposed array where a kernel can read it in another order, such as the
    scores of grouped queries. Elementwise results take the layout of their operands. The elements
    of a row are then not adjacent in memory.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> scores = jax.make_jaxpr(lambda x: 2 * x.swapaxes(2, 3))(jnp.ones((2, 3, 4, 5)))
    >>> len(find_transposed(scores.jaxpr))
    2
    """
    beside: defaultdict[Var, list[Var]] = defaultdict(list)
    turned: list[Var] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is lax.transpose_p:
            turned += eqn.outvars if _moves_columns(eqn) else ()
        elif is_by_element(eqn.primitive) or nested(eqn):
            for one, other in _alike(eqn):
                beside[one].append(other)
                beside[other].append(one)
    return closure(turned, beside.__getitem__)


def _moves_columns(eqn: JaxprEqn) -> bool:
    permutation = eqn.params["permutation"]
    return len(permutation) > 3 and permutation[-1] != len(permutation) - 1


def _alike(eqn: JaxprEqn) -> list[tuple[Var, Var]]:
    """Return pairs of operands and results of one shape, each with the next."""
    by_shape: defaultdict[tuple[int, ...], list[Var]] = defaultdict(list)
    for atom in (*eqn.invars, *eqn.outvars):
        if isinstance(atom, Var) and len(_shape_of(atom)) > 3:
            by_shape[_shape_of(atom)].append(atom)
    return [pair for alike in by_shape.values() for pair in pairwise(alike)]


def _shape_of(atom: Any) -> tuple[int, ...]:
    """Return the shape of an array; that of a scalar for what is none."""
    return getattr(atom.aval, "shape", ())
