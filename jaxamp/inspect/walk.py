"""Walks a program beside its plan and writes down every operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax.extend.core import Jaxpr

from jaxamp.core.taxonomy import OpKind, Trait
from jaxamp.inspect.equation import Body, Equation, Where
from jaxamp.inspect.operation import Operation, Place, is_library, total
from jaxamp.inspect.storage import Casts, Storage
from jaxamp.inspect.tally import Tally
from jaxamp.jaxprs.dce import Live
from jaxamp.jaxprs.name_stack import clean_scope
from jaxamp.plan import JaxprPlan, Plan


class Walk:
    """The operations of a program, those of a loop's body once.

    Attributes:
      operations: in program order.
      unknown_loops: lines of the loops whose trips only running them would tell: they count once.
    """

    def __init__(self, plan: Plan) -> None:
        self.operations: list[Operation] = []
        self.unknown_loops: list[Place] = []
        self._live = Live()
        self._grounds = iter(plan.grounds)  # in the order in which equations are met here
        casts = self._jaxpr(plan.jaxpr.jaxpr, plan.body, Where())
        if (wanted := plan.policy.output_dtype) is not None:
            casts.inserted += sum(p is not None and p is not wanted for p in plan.body.outputs)
        self._add_results(casts, Where())

    def _jaxpr(self, jaxpr: Jaxpr, plan: JaxprPlan | None, where: Where) -> Casts:
        """Adds the operations of a jaxpr; gives the casts of its results."""
        storage = Storage()
        storage.enter(jaxpr.constvars, [None] * len(jaxpr.constvars))
        storage.enter(jaxpr.invars, plan.inputs if plan else [None] * len(jaxpr.invars))
        storage.take(plan.rounded if plan else ())
        decisions = plan.decisions if plan else [None] * len(jaxpr.eqns)
        needed = where.needed or [True] * len(jaxpr.outvars)
        live = self._live.equations(jaxpr, needed)
        wanted = self._live.wanted(jaxpr, needed)
        for eqn, decision, is_live in zip(jaxpr.eqns, decisions, live, strict=True):
            ground = next(self._grounds) if decision else None
            equation = Equation(eqn, decision, ground, storage, where)
            equation.needed = self._live.results(eqn, [v in wanted for v in eqn.outvars])
            self._equation(equation, where.runs * is_live)
        casts = Casts()
        for atom, precision in zip(jaxpr.outvars, plan.outputs if plan else (), strict=False):
            storage.read(casts, atom, precision)
        return casts

    def _equation(self, equation: Equation, outer: int) -> None:
        bodies = equation.bodies()
        runs = outer * self._trips(equation) if equation.trait is Trait.LOOP else outer
        if not bodies:
            self.operations.append(equation.operation(runs))
        elif equation.trait is Trait.BRANCH:
            self._branches(equation, bodies, runs)
        else:
            for body in bodies:
                self._body(equation, body, runs)
        if bodies and equation.casts.inserted + equation.casts.shared:
            self.operations.append(equation.operation(outer, carries=True))

    def _body(self, equation: Equation, body: Body, runs: int) -> None:
        jaxpr, plan = body[0].jaxpr, body[1]
        own = not is_library(jaxpr.debug_info.func_src_info)
        where = Where(equation.scope, runs, equation.frames, own, equation.needed)
        self._add_results(self._jaxpr(jaxpr, plan, where), where)

    def _branches(self, equation: Equation, bodies: Sequence[Body], runs: int) -> None:
        """Only the branch that costs most counts."""
        before, taken = self.operations, []
        for body in bodies:
            self.operations = []
            self._body(equation, body, runs)
            taken.append(self.operations)
        costs = [total(branch) for branch in taken]
        most = max(range(len(taken)), key=lambda i: (costs[i].flops, costs[i].bytes))
        for index, branch in enumerate(taken):
            before += branch if index == most else [replace(o, runs=0) for o in branch]
        self.operations = before

    def _trips(self, loop: Equation) -> int:
        if "length" not in loop.params:
            self.unknown_loops.append(loop.place)
        return loop.params.get("length", 1)

    def _add_results(self, casts: Casts, where: Where) -> None:
        """The casts of what leaves a jaxpr."""
        if casts.inserted or casts.shared:
            self.operations.append(_results(casts, where))


def _results(casts: Casts, where: Where) -> Operation:
    return Operation(
        primitive="result",
        kind=OpKind.BOUNDARY.value,
        arithmetic="f32",
        stored="f32",
        accumulation="",
        operands=(),
        results=(),
        each=Tally(inserted=casts.inserted, shared=casts.shared),
        runs=where.runs,
        reason="leaves in the dtype that is declared",
        guard="",
        scope=clean_scope(where.scope),
        backward="transpose(" in where.scope,
        place=Place(),
        contraction=False,
    )
