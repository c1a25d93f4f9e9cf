"""List every operation of a program, with its decision and cost, its residuals and casts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.core.taxonomy import Trait
from jaxamp.inspect.as_written import WRITTEN, Body, bodies_of
from jaxamp.inspect.dce import Live
from jaxamp.inspect.equation import Equation, Stored, dtype_word, stored_bytes
from jaxamp.inspect.operation import Operation, Place, total
from jaxamp.jaxprs.name_stack import clean_scope, is_transposed, joined_scope
from jaxamp.jaxprs.nested import loop, nested
from jaxamp.plan import JaxprPlan, Plan
from jaxamp.rewrite import run_plan


@dataclass(frozen=True, slots=True)
class Residual:
    """A residual: a value that the forward pass computes and the backward pass reads."""

    scope: str  # where it is computed
    dtype: str  # in which it is stored, in one word
    bytes: int
    bytes_f32: int  # in the original program; 0 for a copy of one that is counted already


def residuals_of(
    jaxpr: Jaxpr, plan: JaxprPlan, stored: Stored, live: Sequence[bool], scope: str
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
        origin = _origin(eqn, eqn.outvars.index(var), scope)
        wide = 0 if var in counted else stored_bytes(var.aval, None)
        counted.add(var)
        narrow = stored_bytes(var.aval, precision)
        yield Residual(origin, dtype_word(var.aval, precision), narrow, wide)


def _accesses(jaxpr: Jaxpr, plan: JaxprPlan) -> Iterator[tuple[int, Var, Precision | None, bool]]:
    """Yield what units of emission read and fused groups make, in order.

    Each is an equation of the unit, a value, the precision of a narrow copy, and whether the value
    is made.
    """
    for step in plan.steps:
        if isinstance(step, int):
            reads = plan.decisions[step].plan.reads
            for atom, read in zip(jaxpr.eqns[step].invars, reads, strict=True):
                if not isinstance(atom, Literal):
                    yield step, atom, read.copy, False
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


class Walk:
    """The operations of a program in their order, those of a loop's body once, and its residuals.

    ``unknown_loops`` are those of a report.
    """

    def __init__(self, plan: Plan) -> None:
        self.operations: list[Operation] = []
        self.unknown_loops: list[Place] = []
        self.residuals: list[Residual] = []
        self._live = Live()
        self._grounds = iter(plan.grounds)  # in the order in which equations are met here
        self._jaxpr(plan.jaxpr.jaxpr, plan.body, None, 1)

    def _jaxpr(self, jaxpr: Jaxpr, plan: JaxprPlan, around: Equation | None, runs: int) -> None:
        """Add the operations of a jaxpr, that of an equation or the whole program."""
        stored = Stored(jaxpr, plan)
        walked = list(self._live.walk(jaxpr, around.needed if around else ()))
        for (eqn, is_live, needed), decision in zip(walked, plan.decisions, strict=True):
            is_written = decision.ground is WRITTEN
            ground = WRITTEN if is_written else next(self._grounds)
            equation = Equation(eqn, decision, ground, stored, around, needed)
            self._equation(equation, runs * is_live)
        live = [is_live for _, is_live, _ in walked]
        self.residuals += [
            replace(r, bytes=r.bytes * runs, bytes_f32=r.bytes_f32 * runs)
            for r in residuals_of(jaxpr, plan, stored, live, around.scope if around else "")
        ]

    def _equation(self, equation: Equation, outer: int) -> None:
        bodies = bodies_of(equation.eqn, equation.decision)
        trips = loop(equation.eqn).trips if equation.trait is Trait.LOOP else 1
        if trips is None:
            self.unknown_loops.append(equation.place)
        runs = outer * (1 if trips is None else trips)
        if not bodies:
            self.operations.append(equation.operation(runs))
        elif equation.trait is Trait.BRANCH:
            self._branches(equation, bodies, runs)
        else:
            for body, plan in bodies:
                self._jaxpr(body.jaxpr, plan, equation, runs)

    def _branches(self, equation: Equation, bodies: Sequence[Body], runs: int) -> None:
        """Add the operations of all branches; only the branch that costs most counts."""
        before, taken = self.operations, []
        for body, plan in bodies:
            self.operations = []
            self._jaxpr(body.jaxpr, plan, equation, runs)
            taken.append(self.operations)
        costs = [total(branch) for branch in taken]
        most = max(range(len(taken)), key=lambda i: (costs[i].flops, costs[i].bytes))
        for index, branch in enumerate(taken):
            before += branch if index == most else [replace(o, runs=0) for o in branch]
        self.operations = before


def count_casts(plan: Plan) -> int:
    """Return how many conversions the program of a plan has more than the original one."""
    closed = plan.jaxpr
    emitted = jax_compat.trace_to_jaxpr(
        lambda *args: run_plan(closed, plan, *args), closed.in_avals, closed.jaxpr.debug_info
    )
    return _conversions(emitted.jaxpr) - _conversions(closed.jaxpr)


def _conversions(jaxpr: Jaxpr) -> int:
    """Count conversions between float formats; those in a loop as often as they run."""
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type":
            aval: Any = eqn.invars[0].aval
            given, made = aval.dtype, eqn.params["new_dtype"]
            are_floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (given, made))
            count += are_floats and given != made
        runs = eqn.params.get("length", 1)
        count += runs * sum(map(_conversions, jaxprs_in_params(eqn.params)))
    return count
