"""Hands the choices back to the jaxprs that they were made for."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Var

from jaxamp.core.formats import Precision
from jaxamp.core.taxonomy import OpKind, Trait
from jaxamp.jaxprs import nested as wiring
from jaxamp.plan.dataflow.label_gathers import is_label_scatter
from jaxamp.plan.decision import Decision, Echo, How, JaxprPlan, Remake, is_wide
from jaxamp.plan.explanations import Grounds
from jaxamp.plan.graph.graph import Frame, Graph, Nest, Node, Role
from jaxamp.plan.loop_invariants import narrow_each_turn, read_beside, rounded_outside
from jaxamp.plan.precision.choose import Choice
from jaxamp.plan.precision.operand_reads import OperandReads
from jaxamp.xla.constant_rematerialization import Rematerialization
from jaxamp.xla.fusion_groups import FusionGroups
from jaxamp.xla.outline import Outliner

Storage = Sequence[Precision | None]


@dataclass(frozen=True, slots=True, eq=False)
class Findings:
    """All that has been found of a program when its plan is put together.

    Attributes:
      graph: the program.
      frame: its outermost jaxpr.
      choices: what was chosen for each node.
      stored: precision in which each value is stored; ``None`` where it is not ours to choose.
      unwidened: values that stay narrow inside a fused group: see exact.py.
      signed: results that are read for their sign alone: see rectified.py.
      readings: how each reader gets its operands.
      held: values whose rounding XLA must not undo.
      summed: indices of the nodes that may sum held values before the barrier.
      echoes: how the cotangents of some sums are rounded.
      fusions: the groups of equations that XLA will fuse; ``None`` if there are none to be made.
    """

    graph: Graph
    frame: Frame
    choices: Mapping[Node, Choice]
    stored: Storage
    unwidened: Set[int]
    signed: Set[int]
    readings: OperandReads
    held: Set[int]
    summed: Set[int]
    echoes: Mapping[int, Echo]
    fusions: FusionGroups | None


def assemble(findings: Findings, outputs: Storage | None) -> JaxprPlan:
    """The plan of the outermost jaxpr, in which equal plans of one jaxpr are one object.

    Args:
      findings: what has been found of the program.
      outputs: precision in which each result has to leave; by default that of the jaxpr.
    """
    assembler, frame = _Assembler(findings), findings.frame
    returned = _of(frame.exits, assembler.original) if outputs is None else outputs
    return assembler.plan(frame, returned, signed=findings.signed)


class _Assembler:
    def __init__(self, findings: Findings) -> None:
        graph, readings, fusions = findings.graph, findings.readings, findings.fusions
        self.graph, self.readings, self.fusions = graph, readings, fusions
        self.stored, self.choices = findings.stored, findings.choices
        self.held, self.summed, self.echoes = findings.held, findings.summed, findings.echoes
        self.fresh, self.copied = list(map(bool, readings.own_cast)), readings.copies.keys()
        self.original = [Precision.F32 if ours else None for ours in graph.is_float32]
        # What a group reads is widened once, so that its cotangents meet in f32.
        self.inside = list(self.original)
        for value in findings.unwidened:
            self.inside[value] = self.stored[value]
        self.kept = bytearray(len(graph.avals)) if fusions is None else fusions.saved
        self.picking = set() if fusions is None else {*fusions.label_gathers, *_spreading(graph)}
        self.remakes = None if fusions is None else Rematerialization(graph)
        self.outliner, self.grounds = Outliner(), Grounds(findings.choices)
        self._shared: dict[Hashable, JaxprPlan] = {}
        self._hows: dict[Hashable, How] = {}

    def plan(
        self,
        frame: Frame,
        returned: Sequence[Precision | None] | None = None,
        remakes: Sequence[Remake] = (),
        *,
        fused: bool = False,
        invariants: int = 0,
        signed: Collection[int] = (),
    ) -> JaxprPlan:
        """The plan of a jaxpr; `fused` if it is part of a group as a whole.

        `invariants` of its first inputs are the same in every turn of a loop; `signed` is what a
        derivative rule keeps, as rectified.py says.
        """
        groups = [] if fused or self.fusions is None else self.fusions.groups(frame)
        grouped = {index for group in groups for index in group}
        if returned is None:
            returned = [self.stored[v] for v in frame.returns]
        inputs = _of(frame.entries, self.inside if fused else self.stored)
        hows = [
            self._how(site)
            if isinstance(site, Node)
            else self._how_of_nest(site, fused=fused or index in grouped)
            for index, site in enumerate(frame.sites)
        ]
        if signed:
            hows = [
                _keeping(site, how, signed) for site, how in zip(frame.sites, hows, strict=True)
            ]
        made = tuple((r.var, *map(id, (m.eqn for m in r.makings))) for r in remakes)
        rounded = rounded_outside(frame.jaxpr, hows, invariants)
        turned = narrow_each_turn(frame.jaxpr, inputs, invariants)
        arriving = inputs, made, rounded, turned
        key = id(frame.jaxpr), arriving, tuple(returned), tuple(hows), tuple(map(tuple, groups))
        if key not in self._shared:
            plan = self._make(frame, inputs, returned, hows, groups)
            self._shared[key] = replace(
                plan, remakes=tuple(remakes), rounded=rounded, turned=turned
            )
        return self._shared[key]

    def _make(
        self,
        frame: Frame,
        inputs: tuple[Precision | None, ...],
        returned: Sequence[Precision | None],
        hows: Sequence[How],
        groups: Sequence[Sequence[int]],
    ) -> JaxprPlan:
        decisions = tuple(map(self._decide, frame.sites, hows))
        unchanged = is_wide((*inputs, *returned)) and all(how.unchanged for how in set(hows))
        groups = () if unchanged else groups
        steps = self.outliner.steps(
            frame.jaxpr, decisions, inputs, returned, groups, self._again(frame, groups)
        )
        return JaxprPlan(
            inputs=inputs,
            decisions=decisions,
            outputs=tuple(returned),
            unchanged=unchanged,
            steps=steps,
        )

    def _how(self, node: Node) -> How:
        choice, ins, outs = self.choices[node], node.ins, node.outs
        original, storage, operand = self.original, self.stored, choice.operand
        if self.fusions is not None and node.role is Role.MOVE and self.fusions.moves_within(node):
            storage, operand = original, Precision.F32
        also = self.readings.dual_reads(node, choice, self.stored)
        fresh = [self.fresh[v] for v in ins]
        for index, _ in also:  # the cotangent goes to what is read beside the cast
            fresh[index] = False
        return self._one(
            operands=tuple([original[v] and operand for v in ins]),
            fresh=tuple(fresh),
            copies=self._copies_for(node),
            outputs=tuple([storage[v] for v in outs]),
            held=tuple([v in self.held for v in outs]),
            kept=tuple([self.kept[v] == 1 for v in outs]),
            accumulation=choice.accumulation,
            unheld=node.index in self.summed,
            echo=self.echoes.get(outs[0]) if outs else None,
            picks=node in self.picking,
            scaled=choice.scaled,
            also=also,
        )

    def _how_of_nest(self, nest: Nest, *, fused: bool) -> How:
        loop = wiring.loop(nest.eqn) if nest.op.trait is Trait.LOOP else None
        inner = self._plans_inside(nest, loop, fused=fused)
        storage = self.inside if fused else self.stored
        return self._one(
            operands=_of(nest.entries, self.original if nest.keeps_signature else storage),
            fresh=tuple([self.fresh[v] for v in nest.entries]),
            copies=(None,) * len(nest.entries),
            outputs=_of(nest.outs, self.stored),
            held=tuple([self._is_held_by_rule(nest, v) for v in nest.outs]),
            kept=(False,) * len(nest.outs),
            inner=inner,
            also=read_beside(loop, inner[-1]) if loop else (),
        )

    def _plans_inside(
        self, nest: Nest, loop: wiring.Loop | None, *, fused: bool
    ) -> tuple[JaxprPlan, ...]:
        return tuple(
            self.plan(
                frame,
                _of(frame.exits, self.original) if nest.keeps_signature else None,
                self.remakes.of(frame) if self.remakes and _stands_apart(nest) else (),
                fused=fused,
                invariants=loop.invariants if loop and frame is nest.frames[-1] else 0,
            )
            for frame in nest.frames
        )

    def _is_held_by_rule(self, nest: Nest, value: int) -> bool:
        """Whether a call holds a result: what its body holds is gone where JAX takes a rule."""
        has_rule = nest.eqn.primitive.name in wiring.RULED
        by_rules = () if self.fusions is None else self.fusions.saved_by_rules
        return has_rule and value in self.held and value not in by_rules

    def _one(self, **parts: Any) -> How:
        """The one object of these parts; nodes name more of them than nests do."""
        key = tuple(parts.values())
        how = self._hows.get(key)
        if how is None:
            how = self._hows[key] = How(**parts)
        return how

    def _decide(self, site: Node | Nest, how: How) -> Decision:
        kind = OpKind.BOUNDARY if isinstance(site, Nest) else site.kind
        return Decision(site.eqn, how, kind, self.grounds.of(site))

    def _again(self, frame: Frame, groups: Sequence[Sequence[int]]) -> dict[Var, int]:
        """The equations that make what a later group computes again rather than reads."""
        if self.fusions is None:
            return {}
        eqns, again = frame.jaxpr.eqns, self.fusions.recomputed
        return {
            var: index
            for group in groups
            for index in group
            for var, out in zip(eqns[index].outvars, frame.sites[index].outs, strict=True)
            if again[out]
        }

    def _copies_for(self, node: Node) -> tuple[Precision | None, ...]:
        """Per operand, the precision of the copy that a node reads."""
        if self.copied.isdisjoint(node.ins):
            return (None,) * len(node.ins)
        return tuple([self._copy_for(v, node) for v in node.ins])

    def _copy_for(self, value: int, node: Node) -> Precision | None:
        """A group computes again what is not stored; others get a copy."""
        if self.fusions is not None and self.fusions.recomputes(node, value):
            return None
        return self.readings.copy_for(value, node)


def _spreading(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.named.get("scatter-add", ()) if is_label_scatter(graph, node))


def _of(values: Sequence[int], storage: Storage) -> tuple[Precision | None, ...]:
    return tuple([storage[v] for v in values])


def _keeping(site: Node | Nest, how: How, kept: Collection[int]) -> How:
    """How a site runs that holds and keeps some of its results."""
    is_kept = tuple([v in kept for v in site.outs])
    return replace(how, held=is_kept, kept=is_kept) if any(is_kept) else how


def _stands_apart(nest: Nest) -> bool:
    """Whether what a body reads is in memory, rather than fused with what makes it."""
    return nest.op.trait is Trait.LOOP or nest.eqn.primitive.name == "remat2"
