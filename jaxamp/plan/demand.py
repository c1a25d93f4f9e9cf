"""What each value is for: one backward sweep, repeated over loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxamp.plan.facts import Facts, movements
from jaxamp.plan.graph import Graph, Link, Node, Role
from jaxamp.taxonomy import Trait

# Whether a Compute node would be lowered, given what its result is for.
Lowerable = Callable[[Node, "Demand"], bool]


@dataclass(slots=True, eq=False)
class Demand:
    """Uses per value.

    Attributes:
      escapes: becomes a result of the program by elementwise operations and movement alone.
      exacting: decides when a loop stops.
      fragile: feeds a factorisation, with no Compute between.
      reaches: feeds a Compute operation that will be lowered.
    """

    escapes: bytearray
    exacting: bytearray
    fragile: bytearray
    reaches: bytearray

    def snapshot(self) -> tuple[bytes, ...]:
        """What changes while the sweeps have not settled."""
        return tuple(map(bytes, (self.escapes, self.exacting, self.fragile, self.reaches)))


def find_demand(graph: Graph, facts: Facts, may_lower: Lowerable, *, no_gain: bool) -> Demand:
    """Sweeps backward until nothing changes; more than once only where a loop feeds back.

    Args:
      graph: the program.
      facts: what is known of its values.
      may_lower: whether a Compute node would be lowered, given what its result is for.
      no_gain: whether what never reaches Compute is to be told apart; else all of it reaches.
    """
    demand = Demand(*(bytearray(len(graph.avals)) for _ in range(4)))
    for value in graph.outputs:
        demand.escapes[value] = 1
    for value in graph.onward:
        demand.reaches[value] = 1
    for value in graph.predicates:
        demand.exacting[value] = 1
    if not no_gain:
        demand.reaches[:] = b"\1" * len(graph.avals)
    kept = frozenset(v for c in graph.carries if c.kept for v in (c.inner, c.result))
    before = None
    while before != (before := demand.snapshot()):
        for node in reversed(graph.nodes):
            _transfer(graph, facts, demand, node, may_lower, kept)
        if not graph.carries:
            break
    return demand


def is_state_update(facts: Facts, demand: Demand, node: Node) -> bool:
    """Whether a node carries a boundary value on to a result: an optimizer's step, an average.

    Such a chain is rounded nowhere, and what it makes is a parameter again: to its readers a
    boundary value, not an activation.
    """
    return node.role in (Role.ELEMENTWISE, Role.MERGE) and any(
        facts.state[v] and demand.escapes[v] for v in node.outs
    )


def _transfer(
    graph: Graph,
    facts: Facts,
    demand: Demand,
    node: Node,
    may_lower: Lowerable,
    kept: frozenset[int],
) -> None:
    role = node.role
    if role is Role.LINK:
        _link(demand, node, kept)
        return
    # A choice of index (the next token, say) is not a convergence test.
    if any(demand.exacting[v] for v in node.outs) and not _picks_index(graph, node):
        _mark(demand.exacting, node.ins)
    if role is Role.CONTRACT:
        if may_lower(node, demand):
            _mark(demand.reaches, node.ins)
        return
    if role is Role.FIXED:
        if node.trait is Trait.LINALG or node.trait is Trait.SOLVER:
            _mark(demand.fragile, node.ins)
        if node.trait is Trait.STATE:
            _mark(demand.escapes, node.ins)
        return
    if any(demand.fragile[v] for v in node.outs):
        _mark(demand.fragile, node.ins)
    if role is Role.MOVE:
        for source, out in movements(node):
            demand.escapes[source] |= demand.escapes[out]
            demand.reaches[source] |= demand.reaches[out]
        return
    if role is not Role.REDUCE and any(demand.escapes[v] for v in node.outs):
        _mark(demand.escapes, node.ins)
    if any(demand.reaches[v] for v in node.outs) and not is_state_update(facts, demand, node):
        _mark(demand.reaches, node.ins)


def _picks_index(graph: Graph, node: Node) -> bool:
    return node.trait is Trait.EXTREMUM and any(graph.kinds[v] in "iu" for v in node.outs)


def _link(demand: Demand, node: Node, kept: frozenset[int]) -> None:
    (out,) = node.outs
    if out in kept:
        if node.link is not Link.INIT:
            # What goes into a kept carry is stored as the original dtype, like a result.
            _mark(demand.escapes, node.ins)
            if demand.exacting[out]:
                _mark(demand.exacting, node.ins)
        return
    if node.link is not Link.INVARIANT and demand.escapes[out]:
        _mark(demand.escapes, node.ins)
    if demand.reaches[out]:
        _mark(demand.reaches, node.ins)
    if demand.fragile[out]:
        _mark(demand.fragile, node.ins)
    if demand.exacting[out] and node.link in (Link.BACK, Link.JOIN, Link.STACK, Link.RESULT):
        _mark(demand.exacting, node.ins)


def _mark(flag: bytearray, values: tuple[int, ...]) -> None:
    for value in values:
        flag[value] = 1
