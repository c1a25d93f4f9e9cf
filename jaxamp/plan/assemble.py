"""Hands the choices back to the jaxprs that they were made for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from jax.extend.core import Var

from jaxamp.formats import Precision
from jaxamp.plan.choose import Choice
from jaxamp.plan.decision import Decision, JaxprPlan
from jaxamp.plan.fusions import Fusions
from jaxamp.plan.graph import Frame, Graph, Nest, Node
from jaxamp.plan.outline import Outliner
from jaxamp.plan.readings import Readings
from jaxamp.taxonomy import OpKind

Storage = Sequence[Precision | None]


def assemble(
    graph: Graph,
    frame: Frame,
    readings: Readings,
    fusions: Fusions | None,
    held: frozenset[int],
    stored: Storage,
    choices: dict[Node, Choice],
    outputs: Storage | None,
) -> JaxprPlan:
    """The plan of the outermost jaxpr, in which equal plans of one jaxpr are one object."""
    assembler = _Assembler(graph, readings, fusions, held, stored, choices)
    returned = [Precision.F32 if graph.ours[v] else None for v in frame.exits]
    return assembler.plan(frame, returned if outputs is None else list(outputs))


class _Assembler:
    def __init__(
        self,
        graph: Graph,
        readings: Readings,
        fusions: Fusions | None,
        held: frozenset[int],
        stored: Storage,
        choices: dict[Node, Choice],
    ) -> None:
        self.fusions, self.held, self.outliner = fusions, held, Outliner()
        self.graph, self.readings, self.stored, self.choices = graph, readings, stored, choices
        self.fresh = readings.fresh
        self._shared: dict[Hashable, JaxprPlan] = {}

    def plan(
        self,
        frame: Frame,
        returned: Sequence[Precision | None] | None = None,
        *,
        fused: bool = False,
    ) -> JaxprPlan:
        """The plan of a jaxpr; `fused` if it is part of a group as a whole."""
        groups = [] if fused or self.fusions is None else self.fusions.groups(frame)
        grouped = {index for group in groups for index in group}
        if returned is None:
            returned = [self.stored[v] for v in frame.returns]
        inputs = self._widened(frame.entries) if fused else self._storage(frame.entries)
        decisions = tuple(
            self._decide(site)
            if isinstance(site, Node)
            else self._decide_nest(site, fused=fused or index in grouped)
            for index, site in enumerate(frame.sites)
        )
        forms = tuple(d.form for d in decisions)
        key = id(frame.jaxpr), inputs, tuple(returned), forms, tuple(map(tuple, groups))
        if key not in self._shared:
            unchanged = _is_wide(inputs, returned) and all(map(_is_unchanged, decisions))
            self._shared[key] = JaxprPlan(
                inputs=inputs,
                decisions=decisions,
                outputs=tuple(returned),
                unchanged=unchanged,
                steps=self.outliner.steps(
                    frame.jaxpr,
                    decisions,
                    forms,
                    inputs,
                    returned,
                    () if unchanged else groups,
                    self._again(frame),
                ),
            )
        return self._shared[key]

    def _decide(self, node: Node) -> Decision:
        choice, ours = self.choices[node], self.graph.ours
        operand, outputs = choice.operand, self._storage(node.outs)
        if self.fusions is not None and self.fusions.moves_within(node):
            operand, outputs = Precision.F32, self._widened(node.outs)
        assert node.eqn is not None
        return Decision(
            primitive=node.eqn.primitive.name,
            kind=node.kind,
            operands=tuple(operand if ours[v] else None for v in node.ins),
            fresh=tuple(bool(self.fresh[v]) for v in node.ins),
            copies=tuple(self._copy_for(v, node) for v in node.ins),
            accumulation=choice.accumulation,
            outputs=outputs,
            held=tuple(v in self.held for v in node.outs),
            kept=tuple(self._is_kept(v) for v in node.outs),
            reason=choice.reason,
            guard=choice.guard,
            raw_scope=node.scope,
            source_info=node.eqn.source_info,
        )

    def _again(self, frame: Frame) -> set[Var]:
        if self.fusions is None:
            return set()
        again = self.fusions.again
        pairs = zip(frame.jaxpr.eqns, frame.sites, strict=True)
        return {v for e, s in pairs for v, out in zip(e.outvars, s.outs, strict=True) if again[out]}

    def _copy_for(self, value: int, node: Node) -> Precision | None:
        """A group computes again what is not stored; others get a copy."""
        if self.fusions is not None and self.fusions.again[value] and self.fusions.has(node):
            return None
        return self.readings.copy_for(value, node)

    def _is_kept(self, value: int) -> bool:
        return self.fusions is not None and bool(self.fusions.kept[value])

    def _decide_nest(self, nest: Nest, *, fused: bool) -> Decision:
        entries = self._storage(nest.entries)
        if nest.keeps_signature or fused:
            entries = self._widened(nest.entries)
        returned = [_original(self.graph, f) for f in nest.frames] if nest.keeps_signature else None
        return Decision(
            primitive=nest.eqn.primitive.name,
            kind=OpKind.BOUNDARY,
            operands=entries,
            fresh=tuple(bool(self.fresh[v]) for v in nest.entries),
            copies=(None,) * len(entries),
            accumulation=None,
            outputs=self._storage(nest.outs),
            held=(False,) * len(nest.outs),
            kept=(False,) * len(nest.outs),
            reason="decided inside",
            guard=None,
            raw_scope=nest.scope,
            source_info=nest.eqn.source_info,
            inner=tuple(
                self.plan(frame, returned[i] if returned else None, fused=fused)
                for i, frame in enumerate(nest.frames)
            ),
        )

    def _widened(self, values: Sequence[int]) -> tuple[Precision | None, ...]:
        """Inside a group what is read is widened once, and its cotangents meet in f32."""
        return tuple(Precision.F32 if self.graph.ours[v] else None for v in values)

    def _storage(self, values: Sequence[int]) -> tuple[Precision | None, ...]:
        return tuple(self.stored[v] for v in values)


def _original(graph: Graph, frame: Frame) -> list[Precision | None]:
    return [Precision.F32 if graph.ours[v] else None for v in frame.exits]


def _is_unchanged(d: Decision) -> bool:
    return _is_wide(d.operands, d.outputs, (d.accumulation,)) and all(
        plan.unchanged for plan in d.inner
    )


def _is_wide(*storages: Storage) -> bool:
    return all(p is None or p is Precision.F32 for storage in storages for p in storage)
