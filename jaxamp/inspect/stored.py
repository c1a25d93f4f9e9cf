"""The precisions in which memory holds the values of a jaxpr, as its plan says."""

from __future__ import annotations

from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxamp.core.formats import Precision
from jaxamp.plan import Decision, JaxprPlan


class Stored:
    """The precision of every float of a jaxpr; ``None`` for what has none of jaxamp's formats."""

    def __init__(self, jaxpr: Jaxpr, plan: JaxprPlan | None) -> None:
        self._precisions = {var: of(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)}
        self._roundings: set[tuple[Any, Precision]] = set()  # in memory beside the values
        if plan:
            arriving = zip(jaxpr.invars, plan.inputs, strict=True)
            self._precisions |= {var: p for var, p in arriving if p is not None}

    def write(self, eqn: JaxprEqn, decision: Decision | None) -> None:
        """Add the results of an equation."""
        self._precisions |= {var: of(var.aval) for var in eqn.outvars}
        if decision is None:
            return
        pairs = zip(eqn.outvars, decision.outputs, strict=True)
        self._precisions |= {var: p for var, p in pairs if p is not None}
        roundings = decision.plan.hints.moved_rounding, decision.sent
        self._roundings |= {(eqn.outvars[0], p) for p in roundings if p}

    def precision(self, atom: Any) -> Precision | None:
        """Return the precision in which memory holds a value."""
        return of(atom.aval) if isinstance(atom, Literal) else self._precisions[atom]

    def source(self, atom: Any, precision: Precision | None) -> Precision | None:
        """Return the precision in which memory holds what a reader casts to `precision`."""
        if not isinstance(atom, Literal) and (atom, precision) in self._roundings:
            return precision
        return self.precision(atom)


def of(aval: Any) -> Precision | None:
    """Return the float format of a type; ``None`` where it has none of jaxamp's."""
    return Precision.of_dtype(getattr(aval, "dtype", None))
