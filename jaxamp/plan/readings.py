"""How each reader gets its operands: by a cast of its own, a shared one, or a narrow copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxamp.formats import Precision
from jaxamp.plan.demand import Demand, is_state_update
from jaxamp.plan.facts import Facts, movements
from jaxamp.plan.graph import Graph, Node, Role
from jaxamp.plan.interior import Interior


@dataclass(slots=True, eq=False)
class Readings:
    """How values are read.

    Attributes:
      graph: the program.
      fresh: boundary values, and what is only moved from them: each use makes its own cast, so
        that cotangents meet in f32; XLA merges the casts themselves.
      copies: precision of the copy that far readers of a fused value get.
    """

    graph: Graph
    fresh: bytearray
    copies: Mapping[int, Precision]
    interior: Interior

    def copy_for(self, value: int, reader: Node) -> Precision | None:
        """The copy that a reader gets, ``None`` for the value itself."""
        copy = self.copies.get(value)
        return copy if copy and self.interior.is_far(value, reader) else None


def find_readings(
    graph: Graph,
    facts: Facts,
    demand: Demand,
    interior: Interior,
    copies: Mapping[int, Precision],
) -> Readings:
    """Follows boundary values through movement, and adds what an update makes of them."""
    fresh = bytearray(len(graph.avals))
    for value in graph.sources:
        fresh[value] = 1
    for carry in graph.carries:
        fresh[carry.inner] = fresh[carry.result] = carry.kept
    for node in graph.nodes:
        if node.role is Role.MOVE:
            for source, out in movements(node):
                fresh[out] = fresh[source]
        elif is_state_update(facts, demand, node):
            for out in node.outs:
                fresh[out] = 1
    return Readings(graph, fresh, copies, interior)
