"""Find the residuals of a program: what its forward pass stores for its backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxamp.core.formats import Precision
from jaxamp.inspect.count import size
from jaxamp.inspect.equation import dtype_word, element_width
from jaxamp.inspect.stored import Stored
from jaxamp.jaxprs.name_stack import clean_scope, is_transposed, joined_scope
from jaxamp.jaxprs.nested import nested
from jaxamp.plan import JaxprPlan


@dataclass(frozen=True, slots=True)
class Residual:
    """A residual: a value that the forward pass computes and the backward pass reads.

    Attributes:
      scope: where it is computed.
      dtype: the dtype in which it is stored, in one word.
      bytes: its size.
      bytes_f32: its size in the original program; 0 for a copy of one that is counted already.
    """

    scope: str
    dtype: str
    bytes: int
    bytes_f32: int


def residuals_of(
    jaxpr: Jaxpr, plan: JaxprPlan | None, stored: Stored, live: Sequence[bool], scope: str
) -> Iterator[Residual]:
    """Yield the residuals of one jaxpr, each value once in each precision.

    What a fused group recomputes is no residual. Nor are parameters and other inputs: they are in
    memory anyway.
    """
    scopes = [joined_scope(scope, eqn) for eqn in jaxpr.eqns]
    backward = list(map(is_transposed, scopes))
    if not any(backward) or all(backward):
        return
    makers = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars if not backward[n]}
    known: set[tuple[Var, Precision | None]] = set()  # seen, or made again in the backward pass
    counted: set[Var] = set()
    for n, var, copy, is_made in _accesses(jaxpr, plan):
        if not (live[n] and backward[n] and var in makers):
            continue
        precision = copy or stored.precision(var)
        if (var, precision) in known:
            continue
        known.add((var, precision))
        if is_made:
            continue
        eqn = jaxpr.eqns[makers[var]]
        bytes_ = int(size(var.aval) * element_width(var.aval, precision))
        origin = _origin(eqn, eqn.outvars.index(var), scope)
        wide = 0 if var in counted else int(size(var.aval) * element_width(var.aval, None))
        counted.add(var)
        yield Residual(origin, dtype_word(var.aval, precision), bytes_, wide)


def _accesses(
    jaxpr: Jaxpr, plan: JaxprPlan | None
) -> Iterator[tuple[int, Var, Precision | None, bool]]:
    """Yield what units of emission read and fused groups make, in order.

    Each is an equation of the unit, a value, the precision of a narrow copy, and whether the value
    is made.
    """
    for step in plan.steps if plan else range(len(jaxpr.eqns)):
        if isinstance(step, int):
            eqn = jaxpr.eqns[step]
            reads = plan.decisions[step].reads if plan else [None] * len(eqn.invars)
            for atom, read in zip(eqn.invars, reads, strict=True):
                if not isinstance(atom, Literal):
                    yield step, atom, read and read.copy, False
            continue
        for readings, is_made in ((step.inputs, False), (step.outputs, True)):
            for reading in readings:
                copy = reading.precision if reading.is_copy else None
                yield step.members[-1], reading.var, copy, is_made


def _origin(eqn: JaxprEqn, result: int, outer: str) -> str:
    """Return the scope in which a result is made, inside of calls and loops."""
    scope = joined_scope(outer, eqn)
    for body in nested(eqn)[-1:]:
        outs = body.jaxpr.outvars
        made: Any = outs[result] if result < len(outs) else None
        for inner in body.jaxpr.eqns:
            if made in inner.outvars:
                return _origin(inner, inner.outvars.index(made), scope)
    return clean_scope(scope)
