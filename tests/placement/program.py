"""A planned program as a flat graph, with the decision for each of its equations."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jaxamp.core.taxonomy import Trait
from jaxamp.plan import Decision, FusionCall, JaxprPlan, Plan
from jaxamp.plan.dataflow.lookups import is_repeated_gather
from jaxamp.plan.dataflow.ranges import find_ranges
from jaxamp.plan.graph.graph import Frame, Graph, Link, Nest, Node, Role, sites_of
from jaxamp.plan.graph.unfold import unfold
from jaxamp.plan.precision.carries import settle_carries
from jaxamp.plan.precision.overrides import find_forced

SENT = (Trait.COLLECTIVE, Trait.ALLREDUCE)
"""What goes from device to device."""


@dataclass(frozen=True)
class Program:
    """A planned program.

    Attributes:
      graph: its values and nodes; its carries are kept where a guard keeps them.
      nodes: the nodes that somebody needs something of, in order.
      decisions: what was decided for each node that is an equation.
      nests: the equations that carry jaxprs, with what was decided for them.
      makers: the node that makes each value, if one does.
      runs: how often each value is made.
      through: per value, as bits, the values that it depends on through a kernel.
      recomputed: values inside a fused group that later groups compute again: never in memory.
    """

    graph: Graph
    nodes: tuple[Node, ...]
    decisions: dict[Node, Decision]
    nests: list[tuple[Nest, Decision]]
    makers: dict[int, Node]
    runs: list[int]
    through: list[int]
    recomputed: frozenset[int]

    def is_far(self, value: int, reader: Node) -> bool:
        """Whether what waits of a value is what a reader takes.

        So it is if a kernel that needs the value comes before a fused reader, and if the reader
        picks from memory.
        """
        if picks(self.graph, reader):
            return True
        before = _any(self.through[v] for v in reader.ins)
        return not is_kernel(self.graph, reader) and bool(before >> value & 1)


def unfolded(plan: Plan) -> Program:
    """The program of a plan."""
    graph, frame = unfold(plan.jaxpr)
    find_ranges(graph)
    settle_carries(graph, plan.policy, find_forced(graph, plan.policy))
    sites = dict(zip(sites_of(frame), plan.decisions(), strict=True))
    live = _live(graph)
    return Program(
        graph,
        tuple(n for n in graph.nodes if _acts(n) or any(live[v] for v in n.outs)),
        {site: decision for site, decision in sites.items() if isinstance(site, Node)},
        [(site, decision) for site, decision in sites.items() if isinstance(site, Nest)],
        {v: node for node in graph.nodes if node.link is not Link.BACK for v in node.outs},
        _runs(graph, frame),
        _through(graph),
        frozenset(_recomputed(frame, plan.body)),
    )


def is_kernel(graph: Graph, node: Node) -> bool:
    """Whether a node is never fused with what it reads."""
    if node.trait is Trait.GENERATOR and not node.ins:
        return False
    own = node.role in (Role.CONTRACT, Role.FIXED, Role.LINK)
    indexed = is_placed(graph, node) or is_repeated_gather(graph, node)
    return own or indexed or is_window(graph, node) or node.trait in SENT


def is_window(graph: Graph, node: Node) -> bool:
    """Whether a node folds and keeps its axes: pooling, running sums."""
    ranks = {getattr(graph.avals[v], "ndim", 0) for v in (node.ins[:1] + node.outs[:1])}
    return node.role is Role.REDUCE and len(ranks) == 1


def picks(graph: Graph, node: Node) -> bool:
    """Whether a node picks from what is in memory: pooling, a running maximum, a sort."""
    return is_window(graph, node) and node.trait is Trait.EXTREMUM


def is_placed(graph: Graph, node: Node) -> bool:
    """Whether a node writes to places that an index says."""
    return node.role is Role.MERGE and any(graph.kinds[v] in "iu" for v in node.ins[1:])


def _any(bits: Iterable[int]) -> int:
    return functools.reduce(operator.or_, bits, 0)


def _acts(node: Node) -> bool:
    return node.eqn is not None and bool(node.eqn.effects)


def _frames(site: Node | Nest) -> tuple[Frame, ...]:
    return site.frames if isinstance(site, Nest) else ()


def _live(graph: Graph) -> list[bool]:
    needed = {*graph.outputs, *graph.onward, *graph.predicates, *graph.indices}
    live = [value in needed for value in range(len(graph.avals))]
    before = None
    while before != (before := sum(live)):
        for node in reversed(graph.nodes):
            if _acts(node) or any(live[v] for v in node.outs):
                for value in node.ins:
                    live[value] = True
    return live


def _runs(graph: Graph, frame: Frame) -> list[int]:
    runs = [1] * len(graph.avals)

    def visit(frame: Frame, turns: int) -> None:
        for site in frame.sites:
            inside = turns * site.eqn.params.get("length", 1) if _frames(site) else turns
            for inner in _frames(site):
                if isinstance(site, Nest) and site.op.trait is Trait.LOOP:
                    for value in inner.entries:
                        runs[value] = inside
                visit(inner, inside)
            if isinstance(site, Node) or site.op.trait in (Trait.LOOP, Trait.BRANCH):
                for value in site.outs:
                    runs[value] = turns

    visit(frame, 1)
    for node in graph.nodes:
        if node.link is Link.INVARIANT:
            runs[node.outs[0]] = runs[node.ins[0]]
    return runs


def _through(graph: Graph) -> list[int]:
    through = [0] * len(graph.avals)
    origins = [1 << value for value in range(len(graph.avals))]
    for node in graph.nodes:
        if node.link is not Link.BACK:
            needed, before = _any(origins[v] for v in node.ins), _any(through[v] for v in node.ins)
            for value in node.outs:
                origins[value] |= needed
                through[value] = needed if is_kernel(graph, node) else before
    return through


def _recomputed(frame: Frame, plan: JaxprPlan) -> Iterator[int]:
    """Values of fused groups that the groups do not give to anybody."""
    calls = [step for step in plan.steps if isinstance(step, FusionCall)]
    given = {reading.var for call in calls for reading in call.outputs}
    alone = {step for step in plan.steps if isinstance(step, int)}
    for index, (site, decision) in enumerate(zip(frame.sites, plan.decisions, strict=True)):
        if index not in alone:
            inside = {v for inner in _frames(site) for s in sites_of(inner) for v in s.outs}
            kept = {v for var, v in zip(site.eqn.outvars, site.outs, strict=True) if var in given}
            yield from {*inside, *site.outs} - kept
        else:
            for inner, inner_plan in zip(_frames(site), decision.plan.inner, strict=True):
                yield from _recomputed(inner, inner_plan)
