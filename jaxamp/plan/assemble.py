"""Hands the choices back to the jaxprs that they were made for."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from jax.extend.core import Jaxpr, Var

from jaxamp.formats import Precision, is_narrow
from jaxamp.plan import wiring
from jaxamp.plan.choose import Choice
from jaxamp.plan.decision import (
    Also,
    Decision,
    Echo,
    Form,
    Forms,
    Ground,
    How,
    JaxprPlan,
    Remake,
    is_wide,
)
from jaxamp.plan.fusions import Fusions
from jaxamp.plan.graph import Frame, Graph, Nest, Node
from jaxamp.plan.outline import Outliner
from jaxamp.plan.picks import spreads
from jaxamp.plan.readings import Readings
from jaxamp.plan.remakes import Remakes
from jaxamp.taxonomy import OpKind, Trait

Storage = Sequence[Precision | None]


def assemble(
    graph: Graph,
    frame: Frame,
    readings: Readings,
    fusions: Fusions | None,
    held: frozenset[int],
    summed: Set[int],
    echoes: Mapping[int, Echo],
    stored: Storage,
    unwidened: Collection[int],
    signed: Collection[int],
    choices: dict[Node, Choice],
    outputs: Storage | None,
) -> JaxprPlan:
    """The plan of the outermost jaxpr, in which equal plans of one jaxpr are one object."""
    assembler = _Assembler(
        graph, readings, fusions, held, summed, echoes, stored, unwidened, choices
    )
    returned = [Precision.F32 if graph.ours[v] else None for v in frame.exits]
    return assembler.plan(frame, returned if outputs is None else list(outputs), signed=signed)


def grounds_of(frame: Frame, choices: Mapping[Node, Choice]) -> tuple[Ground, ...]:
    """Why each equation runs as it does, in each of the places that equal plans are shared by."""
    grounds = _Grounds(choices)
    return tuple(map(grounds.of, _sites(frame)))


def _sites(frame: Frame) -> Iterator[Node | Nest]:
    """Every equation, nested ones after the one that holds them."""
    for site in frame.sites:
        yield site
        if isinstance(site, Nest):
            for inner in site.frames:
                yield from _sites(inner)


class _Grounds:
    """Why equations run as they do; equal choices are one object, and so are their grounds."""

    def __init__(self, choices: Mapping[Node, Choice]) -> None:
        self.choices = choices
        self._made: dict[tuple[int, str], Ground] = {}

    def of(self, site: Node | Nest) -> Ground:
        choice = _INSIDE if isinstance(site, Nest) else self.choices[site]
        place = id(choice), site.scope
        ground = self._made.get(place)
        if ground is None:
            ground = self._made[place] = Ground(choice.reason, choice.guard, site.scope)
        return ground


_INSIDE = Choice(None, Precision.F32, "decided inside")


class _Assembler:
    def __init__(
        self,
        graph: Graph,
        readings: Readings,
        fusions: Fusions | None,
        held: frozenset[int],
        summed: Set[int],
        echoes: Mapping[int, Echo],
        stored: Storage,
        unwidened: Collection[int],
        choices: dict[Node, Choice],
    ) -> None:
        self.fusions, self.held, self.outliner = fusions, held, Outliner()
        self.summed, self.echoes = summed, echoes
        self.graph, self.readings, self.stored, self.choices = graph, readings, stored, choices
        self.fresh, self.copied = readings.fresh, readings.copies.keys()
        self.original = [Precision.F32 if ours else None for ours in graph.ours]
        # What a group reads is widened once, so that its cotangents meet in f32.
        self.inside = list(self.original)
        for value in unwidened:
            self.inside[value] = stored[value]
        self.kept = bytearray(len(graph.avals)) if fusions is None else fusions.kept
        self.remakes = None if fusions is None else Remakes(graph)
        self._shared: dict[Hashable, JaxprPlan] = {}
        self.grounds = _Grounds(choices)
        self._hows: dict[tuple[Any, ...], How] = {}

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
        rounded = _rounded(frame.jaxpr, hows, invariants)
        turned = _turned(frame.jaxpr, inputs, invariants)
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
        moves_within = self.fusions is not None and self.fusions.moves_within(node)
        operand = Precision.F32 if moves_within else choice.operand
        no_copies = (None,) * len(ins)
        also = self.readings.also(node, choice, self.stored)
        fresh = [self.fresh[v] == 1 for v in ins]
        for index, _ in also:
            fresh[index] = False
        is_copied = not self.copied.isdisjoint(ins)
        return self._one(
            tuple([self.original[v] and operand for v in ins]),
            tuple(fresh),
            tuple([self._copy_for(v, node) for v in ins]) if is_copied else no_copies,
            choice.accumulation,
            _of(outs, self.original if moves_within else self.stored),
            tuple([v in self.held for v in outs]),
            tuple([self.kept[v] == 1 for v in outs]),
            node.index in self.summed,
            self.echoes.get(outs[0]) if outs else None,
            self._picks(node),
            (),
            choice.scaled,
            also,
        )

    def _picks(self, node: Node) -> bool:
        if self.fusions is None:
            return False
        return node in self.fusions.picking or spreads(self.graph, node)

    def _how_of_nest(self, nest: Nest, *, fused: bool) -> How:
        returned = [_of(f.exits, self.original) for f in nest.frames]
        loop = wiring.loop(nest.eqn) if nest.op.trait is Trait.LOOP else None
        inner = tuple(
            self.plan(
                frame,
                returned[i] if nest.keeps_signature else None,
                self.remakes.of(frame) if self.remakes and _stands_apart(nest) else (),
                fused=fused,
                invariants=loop.invariants if loop and frame is nest.frames[-1] else 0,
            )
            for i, frame in enumerate(nest.frames)
        )
        no = (False,) * len(nest.outs)
        # What its body holds is gone where JAX takes a rule instead of the body.
        by_rules = () if self.fusions is None else self.fusions.by_rules
        has_rule = nest.eqn.primitive.name in wiring.RULED
        held = [has_rule and v in self.held and v not in by_rules for v in nest.outs]
        storage = self.inside if fused else self.stored
        return self._one(
            _of(nest.entries, self.original if nest.keeps_signature else storage),
            tuple([self.fresh[v] == 1 for v in nest.entries]),
            (None,) * len(nest.entries),
            None,
            _of(nest.outs, self.stored),
            tuple(held),
            no,
            False,
            None,
            False,
            inner,
            None,
            _casts_of(loop, inner[-1]) if loop else (),
        )

    def _one(self, *parts: Any) -> How:
        """The one object of these parts."""
        how = self._hows.get(parts)
        if how is None:
            how = self._hows[parts] = How(*parts)
        return how

    def _decide(self, site: Node | Nest, how: How) -> Decision:
        kind = OpKind.BOUNDARY if isinstance(site, Nest) else site.kind
        return Decision(site.eqn, how, kind, self.grounds.of(site))

    def _again(self, frame: Frame, groups: Sequence[Sequence[int]]) -> dict[Var, int]:
        """The equations that make what a later group computes again rather than reads."""
        if self.fusions is None:
            return {}
        eqns, again = frame.jaxpr.eqns, self.fusions.again
        return {
            var: index
            for group in groups
            for index in group
            for var, out in zip(eqns[index].outvars, frame.sites[index].outs, strict=True)
            if again[out]
        }

    def _copy_for(self, value: int, node: Node) -> Precision | None:
        """A group computes again what is not stored; others get a copy."""
        if self.fusions is not None and self.fusions.remakes(node, value):
            return None
        return self.readings.copy_for(value, node)


def _of(values: Sequence[int], storage: Storage) -> tuple[Precision | None, ...]:
    return tuple([storage[v] for v in values])


def _keeping(site: Node | Nest, how: How, kept: Collection[int]) -> How:
    """How a site runs that holds and keeps some of its results."""
    is_kept = tuple([v in kept for v in site.outs])
    return replace(how, held=is_kept, kept=is_kept) if any(is_kept) else how


def _rounded(jaxpr: Jaxpr, hows: Sequence[How], invariants: int) -> Forms:
    """The casts of a loop's invariants that its body reads: they are made once, outside."""
    if not invariants:
        return ()
    read = {
        eqn.invars[index]: precision or how.operands[index]
        for eqn, how in zip(jaxpr.eqns, hows, strict=True)
        for index, precision in how.also
    }
    return tuple((v, Form(read[v])) for v in jaxpr.invars[:invariants] if v in read)


def _turned(jaxpr: Jaxpr, inputs: Sequence[Precision | None], invariants: int) -> tuple[Var, ...]:
    """The invariants of a loop that are narrow in its body."""
    pairs = zip(jaxpr.invars[:invariants], inputs, strict=False)
    return tuple(var for var, precision in pairs if is_narrow(precision))


def _casts_of(loop: wiring.Loop, plan: JaxprPlan) -> Also:
    """The operands of a loop that its body reads cast, or is differentiated by in f32."""
    place = {var: loop.test_invariants + i for i, var in enumerate(loop.body.jaxpr.invars)}
    casts = [(place[var], form.precision) for var, form in plan.rounded]
    return (*casts, *((place[var], Precision.F32) for var in plan.turned))


def _stands_apart(nest: Nest) -> bool:
    """Whether what a body reads is in memory, rather than fused with what makes it."""
    return nest.op.trait is Trait.LOOP or nest.eqn.primitive.name == "remat2"
