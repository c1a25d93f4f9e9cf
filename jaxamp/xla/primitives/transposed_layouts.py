"""Find arrays that XLA:GPU leaves in a transposed layout: transposes, and arithmetic on them.

XLA:GPU makes no copy of a transposed array where a kernel can read it in another order, such as the
scores of grouped queries. Elementwise results take the layout of their operands. The elements of a
row are then not adjacent in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from itertools import pairwise
from typing import Any

from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jaxamp.core.taxonomy import OpKind, lookup
from jaxamp.jaxprs.nested import nested

# Their results take the layout of their operands.
_THROUGH = ("add_any", "convert_element_type", "rounding_barrier", "residual", "name")


def find_transposed(jaxpr: Jaxpr) -> Set[Var]:
    """Find the arrays of more than three axes that XLA:GPU leaves in a transposed layout.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> scores = jax.make_jaxpr(lambda x: 2 * x.swapaxes(2, 3))(jnp.ones((2, 3, 4, 5)))
    >>> len(find_transposed(scores.jaxpr))
    2
    """
    beside: defaultdict[Var, list[Var]] = defaultdict(list)
    pending: list[Var] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is lax.transpose_p:
            pending += eqn.outvars if _moves_columns(eqn) else ()
        elif is_elementwise(eqn) or eqn.primitive.name in _THROUGH or nested(eqn):
            for one, other in _alike(eqn):
                beside[one].append(other)
                beside[other].append(one)
    found = set(pending)
    for var in pending:
        new = [other for other in beside[var] if other not in found]
        found.update(new)
        pending += new
    return found


def _moves_columns(eqn: JaxprEqn) -> bool:
    permutation = eqn.params["permutation"]
    return len(permutation) > 3 and permutation[-1] != len(permutation) - 1


def _alike(eqn: JaxprEqn) -> list[tuple[Var, Var]]:
    """Return pairs of operands and results of one shape, each with the next."""
    by_shape: defaultdict[tuple[int, ...], list[Var]] = defaultdict(list)
    for atom in (*eqn.invars, *eqn.outvars):
        if isinstance(atom, Var) and len(shape_of(atom)) > 3:
            by_shape[shape_of(atom)].append(atom)
    return [pair for alike in by_shape.values() for pair in pairwise(alike)]


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Return whether an equation computes each number of its results from one of each operand."""
    described = lookup(eqn.primitive)
    return described is not None and described.kind is OpKind.ELEMENTWISE


def shape_of(atom: Any) -> tuple[int, ...]:
    """Return the shape of an array; that of a scalar for what is none."""
    return getattr(atom.aval, "shape", ())
