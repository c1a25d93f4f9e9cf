"""Analysis of which inputs of a program can be narrow, backward from its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxamp.jaxprs.nested import called, loop, nested
from jaxamp.rewrite.primitives.accumulate import accumulate_p, split_originals
from jaxamp.tools.serving.transparent import INLINED, only_moves

Needs: TypeAlias = set[np.dtype]
"""The dtypes in which a value is used; empty for a value that is not."""


def narrow_dtypes(closed: ClosedJaxpr, count: int) -> list[np.dtype | None]:
    """Return for each of the first inputs the narrow dtype to which all its uses cast it.

    Args:
      closed: a program.
      count: how many of its inputs are looked at.

    Returns:
      A dtype for an input that is better stored in it, ``None`` for any other.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda w, b, x: (w.T @ x.T).astype("bfloat16") + b)
    >>> narrow_dtypes(program(*map(jnp.ones, ((2, 3), 1, (4, 2)))), 2)
    [None, None]
    >>> program = jax.make_jaxpr(lambda w, b, x: w.T.astype("bfloat16") @ x + b)
    >>> narrow_dtypes(program(*map(jnp.ones, ((2, 3), 1, 2))), 2)
    [dtype(bfloat16), None]
    """
    jaxpr = closed.jaxpr
    found = _input_needs(jaxpr, _own_needs(jaxpr.outvars))[:count]
    return [_narrower(var.aval, needs) for var, needs in zip(jaxpr.invars, found, strict=False)]


def _input_needs(jaxpr: Jaxpr, wanted: Sequence[Needs]) -> list[Needs]:
    """Return the dtypes in which inputs are used, if the results are used as wanted."""
    needs: dict[Var, Needs] = {}

    def add(atoms: Sequence[Any], uses: Sequence[Needs]) -> None:
        for atom, use in zip(atoms, uses, strict=False):
            if not isinstance(atom, Literal):
                needs.setdefault(atom, set()).update(use)

    add(jaxpr.outvars, wanted)
    for eqn in reversed(jaxpr.eqns):
        results = [needs.get(var, set()) for var in eqn.outvars]
        add(eqn.invars, _operand_needs(eqn, results))
    return [needs.get(var, set()) for var in jaxpr.invars]


def _operand_needs(eqn: JaxprEqn, results: Sequence[Needs]) -> list[Needs]:
    name = eqn.primitive.name
    if name == "convert_element_type":
        return [{eqn.params["new_dtype"]}]
    own = _own_needs(eqn.invars)
    if eqn.primitive is accumulate_p:  # what its operands are roundings of is not computed with
        operands, originals = split_originals(own, eqn.params["rounded"])
        return [*operands, *(set() for _ in originals)]
    if only_moves(eqn):
        return [*results, *own[len(results) :]]
    if name == "jit" or name in INLINED:
        return _input_needs(called(eqn).jaxpr, results)
    if name == "cond":
        inner = [_input_needs(b.jaxpr, _own_needs(b.jaxpr.outvars)) for b in nested(eqn)]
        return [own[0], *(set().union(*uses) for uses in zip(*inner, strict=True))]
    if name in ("scan", "while"):
        return _loop_needs(eqn, own)
    return own


def _loop_needs(eqn: JaxprEqn, own: list[Needs]) -> list[Needs]:
    """Return the invariants and slices as the body uses them; carries as they are."""
    wired, body = loop(eqn), nested(eqn)[-1].jaxpr
    tests, _, carries, _ = wired.parts(own)
    inner = _input_needs(body, _own_needs(body.outvars))
    _, invariants, _, sliced = wired.parts([*tests, *inner])
    return [*tests, *invariants, *carries, *sliced]


def _own_needs(atoms: Sequence[Any]) -> list[Needs]:
    return [{atom.aval.dtype} if hasattr(atom.aval, "dtype") else set() for atom in atoms]


def _narrower(aval: Any, needs: Needs) -> np.dtype | None:
    if len(needs) != 1 or not jnp.issubdtype(aval.dtype, jnp.floating):
        return None
    (dtype,) = needs
    is_narrower = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < aval.dtype.itemsize
    return dtype if is_narrower else None
