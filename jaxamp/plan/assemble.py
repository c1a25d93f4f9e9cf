"""Hands the choices back to the jaxprs that they were made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxamp.formats import Precision
from jaxamp.plan.choose import Choice
from jaxamp.plan.decision import Decision, JaxprPlan
from jaxamp.plan.graph import Frame, Graph, Nest, Node
from jaxamp.plan.readings import Readings
from jaxamp.taxonomy import OpKind

Storage = Sequence[Precision | None]


def assemble(
    graph: Graph,
    frame: Frame,
    readings: Readings,
    held: frozenset[int],
    stored: Storage,
    choices: dict[Node, Choice],
    outputs: Storage | None,
) -> JaxprPlan:
    """The plan of the outermost jaxpr, in which equal plans of one jaxpr are one object."""
    assembler = _Assembler(graph, readings, held, stored, choices)
    returned = [Precision.F32 if graph.ours[v] else None for v in frame.exits]
    return assembler.plan(frame, returned if outputs is None else list(outputs))


class _Assembler:
    def __init__(
        self,
        graph: Graph,
        readings: Readings,
        held: frozenset[int],
        stored: Storage,
        choices: dict[Node, Choice],
    ) -> None:
        self.held = held
        self.graph, self.readings, self.stored, self.choices = graph, readings, stored, choices
        self.fresh = readings.fresh
        self._shared: dict[Any, JaxprPlan] = {}

    def plan(self, frame: Frame, returned: Sequence[Precision | None] | None = None) -> JaxprPlan:
        if returned is None:
            returned = [self.stored[v] for v in frame.returns]
        inputs = tuple(self.stored[v] for v in frame.entries)
        decisions = tuple(
            self._decide(site) if isinstance(site, Node) else self._decide_nest(site)
            for site in frame.sites
        )
        key = id(frame.jaxpr), inputs, tuple(returned), tuple(map(_identity, decisions))
        if key not in self._shared:
            self._shared[key] = JaxprPlan(
                inputs=inputs,
                decisions=decisions,
                outputs=tuple(returned),
                unchanged=_is_wide(inputs, returned) and all(map(_is_unchanged, decisions)),
            )
        return self._shared[key]

    def _decide(self, node: Node) -> Decision:
        choice, ours = self.choices[node], self.graph.ours
        assert node.eqn is not None
        return Decision(
            primitive=node.eqn.primitive.name,
            kind=node.kind,
            operands=tuple(choice.operand if ours[v] else None for v in node.ins),
            fresh=tuple(bool(self.fresh[v]) for v in node.ins),
            copies=tuple(self.readings.copy_for(v, node) for v in node.ins),
            accumulation=choice.accumulation,
            outputs=self._storage(node.outs),
            held=tuple(v in self.held for v in node.outs),
            reason=choice.reason,
            guard=choice.guard,
            raw_scope=node.scope,
            source_info=node.eqn.source_info,
        )

    def _decide_nest(self, nest: Nest) -> Decision:
        entries = self._storage(nest.entries)
        if nest.keeps_signature:
            entries = tuple(Precision.F32 if self.graph.ours[v] else None for v in nest.entries)
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
            reason="decided inside",
            guard=None,
            raw_scope=nest.scope,
            source_info=nest.eqn.source_info,
            inner=tuple(
                self.plan(frame, returned[i] if returned else None)
                for i, frame in enumerate(nest.frames)
            ),
        )

    def _storage(self, values: Sequence[int]) -> tuple[Precision | None, ...]:
        return tuple(self.stored[v] for v in values)


def _original(graph: Graph, frame: Frame) -> list[Precision | None]:
    return [Precision.F32 if graph.ours[v] else None for v in frame.exits]


def _identity(d: Decision) -> tuple[Any, ...]:
    """What tells two decisions on one equation apart, as far as the rewriter can see."""
    return d.operands, d.fresh, d.copies, d.outputs, d.held, d.accumulation, tuple(map(id, d.inner))


def _is_unchanged(d: Decision) -> bool:
    return _is_wide(d.operands, d.outputs, (d.accumulation,)) and all(
        plan.unchanged for plan in d.inner
    )


def _is_wide(*storages: Storage) -> bool:
    return all(p is None or p is Precision.F32 for storage in storages for p in storage)
