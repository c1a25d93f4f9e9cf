"""Assemble the plan: return the choices to the jaxprs that they were made for."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import Jaxpr, Var

from jaxamp.core.formats import Precision, is_narrow
from jaxamp.core.taxonomy import Trait
from jaxamp.jaxprs.nested import RULED, Loop, loop
from jaxamp.plan.decision import (
    Decision,
    EquationPlan,
    Ground,
    Hints,
    InputCast,
    JaxprPlan,
    OperandRead,
    RematerializedInput,
    is_wide,
)
from jaxamp.plan.findings import Findings, Groupings, Precisions, Steering
from jaxamp.plan.graph.graph import Frame, Nest, Node, Role
from jaxamp.plan.precision.choose import Choice


def assemble(
    findings: Findings,
    steering: Steering,
    grounds: Mapping[Node | Nest, Ground],
    outputs: Precisions | None,
) -> JaxprPlan:
    """Return the plan of the outermost jaxpr, in which equal plans of one jaxpr are one object."""
    assembler, frame = _Assembler(findings, steering, grounds), findings.frame
    returned = _of(frame.exits, assembler.original) if outputs is None else outputs
    return assembler.plan(frame, returned, signs=steering.relu_signs)


class _Assembler:
    def __init__(
        self, findings: Findings, steering: Steering, grounds: Mapping[Node | Nest, Ground]
    ) -> None:
        self.grounds = grounds
        readings = findings.readings
        self.readings, self.groups, self.steering = readings, findings.groups, steering
        self.stored, self.choices = findings.stored, findings.choices
        self.own_casts, self.copied = list(map(bool, readings.own_cast)), readings.copies.keys()
        self.many_read = readings.many_readers.keys()
        is_float32 = findings.flow.graph.is_float32
        self.original = [Precision.F32 if is_f32 else None for is_f32 in is_float32]
        # What a group reads is widened once, so that its cotangents are summed in f32.
        self.inside = list(self.original)
        for value in findings.exact_narrow:
            self.inside[value] = self.stored[value]
        self._shared: dict[Hashable, JaxprPlan] = {}
        self._node_plans: dict[Hashable, EquationPlan] = {}
        self._nest_plans: dict[Hashable, EquationPlan] = {}

    def plan(
        self,
        frame: Frame,
        returned: Sequence[Precision | None] | None = None,
        rematerialized: Sequence[RematerializedInput] = (),
        *,
        fused: bool = False,
        invariants: int = 0,
        signs: Collection[int] = (),
    ) -> JaxprPlan:
        """Return the plan of a jaxpr, `fused` if it belongs to a group as a whole.

        The first `invariants` inputs are the same in every iteration of a loop; `signs` are results
        that a derivative rule saves (`regions.py`).
        """
        groups = [] if fused or self.groups is None else self.groups.by_frame[frame]
        grouped = {index for group in groups for index in group}
        if returned is None:
            returned = [self.stored[v] for v in frame.returns]
        inputs = _of(frame.entries, self.inside if fused else self.stored)
        plans = [
            self._plan_node(site)
            if isinstance(site, Node)
            else self._plan_nest(site, fused=fused or index in grouped)
            for index, site in enumerate(frame.sites)
        ]
        if signs:
            plans = [
                self._with_residuals(site, plan, signs)
                for site, plan in zip(frame.sites, plans, strict=True)
            ]
        units = [] if fused else self.steering.units.get(frame, ())
        made = tuple((r.var, *map(id, (m.eqn for m in r.equations))) for r in rematerialized)
        forms = find_invariant_forms(frame.jaxpr, plans, inputs[:invariants])
        arriving = inputs, made, forms
        key = id(frame.jaxpr), arriving, tuple(returned), tuple(plans), tuple(map(tuple, units))
        if key not in self._shared:
            plan = JaxprPlan(
                inputs=inputs,
                decisions=tuple(
                    Decision(site.eqn, plan, site.kind, self.grounds[site])
                    for site, plan in zip(frame.sites, plans, strict=True)
                ),
                outputs=tuple(returned),
                unchanged=is_wide((*inputs, *returned)) and all(p.unchanged for p in set(plans)),
                steps=tuple(range(len(plans))),
                rematerialized=tuple(rematerialized),
                invariant_forms=forms,
            )
            self._shared[key] = self._outlined(frame, plan, units) if units else plan
        return self._shared[key]

    def _outlined(self, frame: Frame, plan: JaxprPlan, units: Groupings) -> JaxprPlan:
        """Return a plan that emits some equations as units, if it changes any."""
        if plan.unchanged:
            return plan
        recomputed = self._recomputed(frame, units)
        steps = self.steering.outline.steps(frame.jaxpr, plan, units, recomputed)
        return replace(plan, steps=steps)

    def _plan_node(self, node: Node) -> EquationPlan:
        choice, ins, outs = self.choices[node], node.ins, node.outs
        original, storage, operand = self.original, self.stored, choice.operand
        steering = self.steering
        is_widened = self.groups is not None and node in self.groups.widened
        if is_widened:
            storage, operand = original, Precision.F32
        is_product = node.role is Role.CONTRACT
        originals = self.readings.originals(node, choice, self.stored) if is_product else ()
        moved_rounding = steering.reversed_weights.get(node)
        # Beside a second read, a shared cast: the cotangent goes to what is read beside the cast.
        shared = originals if moved_rounding is None else (0,)
        if is_product and self.readings.shares_casts:
            shared = range(len(ins))
        copied = not self.copied.isdisjoint(ins)
        is_among = not (is_widened or self.many_read.isdisjoint(ins))
        reads = tuple(
            [
                (
                    original[v] and operand,
                    self.own_casts[v] and (i not in shared or v in self.readings.states),
                    self._copy_for(v, node) if copied else None,
                    i in originals,
                    is_among and node in self.readings.many_readers.get(v, ()),
                )
                for i, v in enumerate(ins)
            ]
        )
        hints = (
            tuple(map(steering.barriers.__contains__, outs)),
            tuple(map(steering.residuals.__contains__, outs)),
            node in steering.unbarriered,
            steering.cotangent_roundings.get(outs[0]) if outs else None,
            node in steering.label_gathers,
            moved_rounding,
        )
        outputs = _of(outs, storage)
        key = reads, outputs, hints, choice.accumulation, choice.form
        plan = self._node_plans.get(key)  # most nodes have the plan of another
        if plan is None:
            plan = self._node_plans[key] = EquationPlan(
                reads=tuple([OperandRead(*read) for read in reads]),
                outputs=outputs,
                hints=Hints(*hints),
                accumulation=choice.accumulation,
                form=choice.form,
            )
        return plan

    def _plan_nest(self, nest: Nest, *, fused: bool) -> EquationPlan:
        wired = loop(nest.eqn) if nest.op.trait is Trait.LOOP else None
        inner = self._plans_inside(nest, wired, fused=fused)
        is_ruled = nest.eqn.primitive.name in RULED
        storage = self.inside if fused else self.stored
        # The inputs of a body are the operands that follow the invariants of the loop's test.
        forms = inner[-1].invariant_forms if wired else ()
        first = wired.test_invariants if wired else 0
        entering = self.original if nest.keeps_signature else storage
        return self._shared_plan(
            reads=tuple([OperandRead(entering[v], self.own_casts[v]) for v in nest.entries]),
            outputs=_of(nest.outs, self.stored),
            hints=Hints(
                # Outside, as JAX drops the body of a rule that it differentiates.
                barriers=tuple([is_ruled and v in self.steering.call_barriers for v in nest.outs]),
                residuals=(False,) * len(nest.outs),
                lone=nest in self.steering.lone,
            ),
            inner=inner,
            invariant_forms=tuple(InputCast(first + i, precision) for i, precision in forms),
        )

    def _plans_inside(
        self, nest: Nest, wired: Loop | None, *, fused: bool
    ) -> tuple[JaxprPlan, ...]:
        return tuple(
            self.plan(
                frame,
                _of(frame.exits, self.original) if nest.keeps_signature else None,
                self.steering.rematerialized.get(frame, ()),
                fused=fused,
                invariants=wired.invariants if wired and frame is nest.frames[-1] else 0,
            )
            for frame in nest.frames
        )

    def _with_residuals(
        self, site: Node | Nest, plan: EquationPlan, saved: Collection[int]
    ) -> EquationPlan:
        """Return the plan of an equation some of whose results are residuals."""
        residuals = tuple([v in saved for v in site.outs])
        if not any(residuals):
            return plan
        barriers = residuals if self.steering.uses_barriers else plan.hints.barriers
        hints = plan.hints._replace(barriers=barriers, residuals=residuals)
        return replace(plan, hints=hints)

    def _shared_plan(self, **fields: Any) -> EquationPlan:
        """Return the one plan of these fields."""
        key = tuple(fields.items())
        plan = self._nest_plans.get(key)
        if plan is None:
            plan = self._nest_plans[key] = EquationPlan(**fields)
        return plan

    def _recomputed(self, frame: Frame, units: Groupings) -> dict[Var, int]:
        """Return, per value that a later unit recomputes, the equation that computes it."""
        eqns, recomputed = frame.jaxpr.eqns, self.steering.recomputed
        return {
            var: index
            for unit in units
            for index in unit
            for var, out in zip(eqns[index].outvars, frame.sites[index].outs, strict=True)
            if out in recomputed
        }

    def _copy_for(self, value: int, node: Node) -> Precision | None:
        """Return the precision of the copy read; a group recomputes values that are not stored."""
        is_recomputed = value in self.steering.recomputed
        if is_recomputed and self.groups and self.groups.are_together(node, value):
            return None
        return self.readings.copy_for(value, node)


def find_invariant_forms(
    jaxpr: Jaxpr, plans: Sequence[EquationPlan], invariants: Sequence[Precision | None]
) -> tuple[InputCast, ...]:
    """Return other forms of a loop's invariants, which the loop gets beside its own operands.

    A body that reads a cast of an invariant gets the cast, which is computed once, outside. A body
    that gets an invariant narrow gets it in float32 too: its cotangents are summed over iterations,
    and have the dtype of their primal value. Invariants are the first inputs, in such precisions.
    """
    if not invariants:
        return ()
    read = {
        eqn.invars[index]: precision or plan.reads[index].precision
        for eqn, plan in zip(jaxpr.eqns, plans, strict=True)
        for index, precision in plan.second_reads
    }
    casts = ((i, read.get(var)) for i, var in enumerate(jaxpr.invars[: len(invariants)]))
    narrow = [InputCast(i, Precision.F32) for i, p in enumerate(invariants) if is_narrow(p)]
    return (*(InputCast(i, p) for i, p in casts if p not in (None, Precision.F32)), *narrow)


def _of(values: Sequence[int], storage: Precisions) -> tuple[Precision | None, ...]:
    return tuple(map(storage.__getitem__, values))


def ground_of(site: Node | Nest, choices: Mapping[Node, Choice]) -> Ground:
    """Return why an equation runs as it does."""
    if isinstance(site, Nest):
        return Ground("planned equation by equation", None, site.scope)
    choice = choices[site]
    return Ground(choice.reason, choice.guard, site.scope)
