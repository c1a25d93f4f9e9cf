"""Hands the choices back to the jaxprs that they were made for."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Var

from jaxamp.formats import Precision
from jaxamp.plan.choose import Choice
from jaxamp.plan.decision import Decision, Ground, JaxprPlan, Remake, Scaled
from jaxamp.plan.fusions import Fusions
from jaxamp.plan.graph import Frame, Graph, Nest, Node
from jaxamp.plan.outline import Outliner
from jaxamp.plan.readings import Readings
from jaxamp.plan.remakes import Remakes
from jaxamp.taxonomy import OpKind, Trait

Storage = Sequence[Precision | None]
_INSIDE = "decided inside"


def assemble(
    graph: Graph,
    frame: Frame,
    readings: Readings,
    fusions: Fusions | None,
    held: frozenset[int],
    echoes: Mapping[int, Precision],
    stored: Storage,
    choices: dict[Node, Choice],
    outputs: Storage | None,
) -> JaxprPlan:
    """The plan of the outermost jaxpr, in which equal plans of one jaxpr are one object."""
    assembler = _Assembler(graph, readings, fusions, held, echoes, stored, choices)
    returned = [Precision.F32 if graph.ours[v] else None for v in frame.exits]
    return assembler.plan(frame, returned if outputs is None else list(outputs))


def grounds_of(frame: Frame, choices: Mapping[Node, Choice]) -> list[Ground]:
    """Why each equation runs as it does, in each of the places that equal plans are shared by."""
    found = []
    for site in frame.sites:
        if isinstance(site, Node):
            choice = choices[site]
            found.append(Ground(choice.reason, choice.guard, site.scope))
        else:
            found.append(Ground(_INSIDE, None, site.scope))
            for inner in site.frames:
                found += grounds_of(inner, choices)
    return found


class _Form(NamedTuple):
    """What tells two decisions on one equation apart, as far as the rewriter can see."""

    operand: Any  # one precision, or for a nest one per operand
    fresh: tuple[int, ...]
    copies: tuple[Precision | None, ...]
    accumulation: Precision | None
    outputs: tuple[Precision | None, ...]
    held: tuple[bool, ...]
    kept: tuple[int, ...]
    echoes: tuple[Precision | None, ...]
    inner: tuple[JaxprPlan, ...] = ()
    scaled: Scaled | None = None


class _Assembler:
    def __init__(
        self,
        graph: Graph,
        readings: Readings,
        fusions: Fusions | None,
        held: frozenset[int],
        echoes: Mapping[int, Precision],
        stored: Storage,
        choices: dict[Node, Choice],
    ) -> None:
        self.fusions, self.held, self.echoes, self.outliner = fusions, held, echoes, Outliner()
        self.graph, self.readings, self.stored, self.choices = graph, readings, stored, choices
        self.fresh = readings.fresh
        self.kept = bytearray(len(graph.avals)) if fusions is None else fusions.kept
        self.remakes = None if fusions is None else Remakes(graph)
        self._shared: dict[Hashable, JaxprPlan] = {}

    def plan(
        self,
        frame: Frame,
        returned: Sequence[Precision | None] | None = None,
        remakes: Sequence[Remake] = (),
        *,
        fused: bool = False,
    ) -> JaxprPlan:
        """The plan of a jaxpr; `fused` if it is part of a group as a whole."""
        groups = [] if fused or self.fusions is None else self.fusions.groups(frame)
        grouped = {index for group in groups for index in group}
        if returned is None:
            returned = [self.stored[v] for v in frame.returns]
        inputs = self._widened(frame.entries) if fused else self._storage(frame.entries)
        forms = tuple(
            self._form(site)
            if isinstance(site, Node)
            else self._form_of_nest(site, fused=fused or index in grouped)
            for index, site in enumerate(frame.sites)
        )
        made = tuple((r.var, *map(id, (m.eqn for m in r.makings))) for r in remakes)
        key = id(frame.jaxpr), inputs, tuple(returned), forms, tuple(map(tuple, groups)), made
        if key not in self._shared:
            self._shared[key] = self._make(frame, inputs, returned, forms, groups, remakes)
        return self._shared[key]

    def _make(
        self,
        frame: Frame,
        inputs: tuple[Precision | None, ...],
        returned: Sequence[Precision | None],
        forms: Sequence[_Form],
        groups: Sequence[Sequence[int]],
        remakes: Sequence[Remake],
    ) -> JaxprPlan:
        decisions = tuple(map(self._decide, frame.sites, forms))
        unchanged = _is_wide(inputs, returned) and all(map(_is_unchanged, decisions))
        groups = () if unchanged else groups
        steps = self.outliner.steps(
            frame.jaxpr, decisions, forms, inputs, returned, groups, self._again(frame)
        )
        return JaxprPlan(
            inputs=inputs,
            decisions=decisions,
            outputs=tuple(returned),
            unchanged=unchanged,
            steps=steps,
            remakes=tuple(remakes),
        )

    def _form(self, node: Node) -> _Form:
        choice, outputs = self.choices[node], self._storage(node.outs)
        operand = choice.operand
        if self.fusions is not None and self.fusions.moves_within(node):
            operand, outputs = Precision.F32, self._widened(node.outs)
        return _Form(
            operand=operand,
            fresh=tuple(map(self.fresh.__getitem__, node.ins)),
            copies=tuple([self._copy_for(v, node) for v in node.ins]),
            accumulation=choice.accumulation,
            outputs=outputs,
            held=tuple(map(self.held.__contains__, node.outs)),
            kept=tuple(map(self.kept.__getitem__, node.outs)),
            echoes=tuple(map(self.echoes.get, node.outs)),
            scaled=choice.scaled,
        )

    def _form_of_nest(self, nest: Nest, *, fused: bool) -> _Form:
        is_widened = nest.keeps_signature or fused
        entries = self._widened(nest.entries) if is_widened else self._storage(nest.entries)
        returned = [_original(self.graph, f) for f in nest.frames] if nest.keeps_signature else None
        return _Form(
            operand=entries,
            fresh=tuple(map(self.fresh.__getitem__, nest.entries)),
            copies=(None,) * len(entries),
            accumulation=None,
            outputs=self._storage(nest.outs),
            held=(False,) * len(nest.outs),
            kept=(False,) * len(nest.outs),
            echoes=(None,) * len(nest.outs),
            inner=tuple(
                self.plan(
                    frame,
                    returned[i] if returned else None,
                    self.remakes.of(frame) if self.remakes and _stands_apart(nest) else (),
                    fused=fused,
                )
                for i, frame in enumerate(nest.frames)
            ),
        )

    def _decide(self, site: Node | Nest, form: _Form) -> Decision:
        if isinstance(site, Nest):
            operands, kind, reason, guard = form.operand, OpKind.BOUNDARY, _INSIDE, None
        else:
            choice, kind = self.choices[site], site.kind
            operands = tuple(form.operand if self.graph.ours[v] else None for v in site.ins)
            reason, guard = choice.reason, choice.guard
        return Decision(
            primitive=site.eqn.primitive.name,
            kind=kind,
            operands=operands,
            fresh=tuple(map(bool, form.fresh)),
            copies=form.copies,
            accumulation=form.accumulation,
            outputs=form.outputs,
            held=form.held,
            kept=tuple(map(bool, form.kept)),
            echoes=form.echoes,
            reason=reason,
            guard=guard,
            raw_scope=site.scope,
            source_info=site.eqn.source_info,
            inner=form.inner,
            scaled=form.scaled,
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

    def _widened(self, values: Sequence[int]) -> tuple[Precision | None, ...]:
        """Inside a group what is read is widened once, and its cotangents meet in f32."""
        return tuple(Precision.F32 if self.graph.ours[v] else None for v in values)

    def _storage(self, values: Sequence[int]) -> tuple[Precision | None, ...]:
        return tuple(self.stored[v] for v in values)


def _original(graph: Graph, frame: Frame) -> list[Precision | None]:
    return [Precision.F32 if graph.ours[v] else None for v in frame.exits]


def _stands_apart(nest: Nest) -> bool:
    """Whether what a body reads is in memory, rather than fused with what makes it."""
    return nest.op.trait is Trait.LOOP or nest.eqn.primitive.name == "remat2"


def _is_unchanged(d: Decision) -> bool:
    return _is_wide(d.operands, d.outputs, (d.accumulation,)) and all(
        plan.unchanged for plan in d.inner
    )


def _is_wide(*storages: Storage) -> bool:
    return all(p is None or p is Precision.F32 for storage in storages for p in storage)
