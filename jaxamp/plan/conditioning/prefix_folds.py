"""Values that are combined with shifted parts of themselves: differences, prefix folds, powers.

`c[16:] - c[:-16]` of a running sum, pairwise differences, the products of decay factors that an
associative scan makes: there a rounding of the one value does not stay a rounding of the result.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.graph import Graph, Node, Role, movements

_OF_ONE = (Trait.EXACT, Trait.ROUNDED)  # signs, masks, scales and shifts of one array
_SUMS = (Trait.ROUNDED, Trait.SUM)  # a sum of cotangents is one of arrays


class _SelfCombination:
    """Sweeps over a graph.

    Attributes:
      combined: what is combined with itself.
      origin: what a value was moved from: padded, rolled and sorted arrays are their source.
      computed: what Compute makes.
    """

    def __init__(self, graph: Graph, provenance: Provenance) -> None:
        self.graph, self.provenance = graph, provenance
        self.combined = bytearray(len(graph.avals))
        self.origin = list(range(len(graph.avals)))
        self.computed = bytearray(len(graph.avals))

    def forward(self, node: Node) -> None:
        """Follows movement, and marks what a node combines with itself."""
        if self._moves(node):
            for source, out in movements(node):
                self.origin[out] = self.origin[source]
                self.combined[out] |= self.combined[source]
        elif node.role is Role.CONTRACT:
            for out in node.outs:
                self.computed[out] = 1
        elif node.role is Role.MERGE:
            self._merge(node)
        elif node.trait in _SUMS:
            self._combine(node)
            self._scale(node)

    def backward(self, node: Node) -> None:
        """Marks what a marked value is made of by movement, and by arithmetic on it alone."""
        if self._moves(node):
            self.mark(source for source, out in movements(node) if self.combined[out])
        elif not any(self.combined[v] for v in node.outs):
            return
        elif node.role is Role.MERGE:
            self.mark(self._dense(node))
        elif node.role is Role.ELEMENTWISE and node.trait in _OF_ONE:
            parts = self._dense(node)
            self.mark(parts if len(parts) == 1 else ())

    def _moves(self, node: Node) -> bool:
        """Whether a node only moves values or turns their sign: `sort` counts as movement."""
        if node.trait is not Trait.EXTREMUM:
            return node.role is Role.MOVE or node.name == "neg"
        avals = self.graph.avals
        return all(avals[source].shape == avals[out].shape for source, out in movements(node))

    def _merge(self, node: Node) -> None:
        parts = self._dense(node)
        if parts and all(self.combined[v] for v in parts):
            self.mark(node.outs)
        if len(origins := {self.origin[v] for v in parts}) == 1:
            (self.origin[node.outs[0]],) = origins

    def _combine(self, node: Node) -> None:
        parts = self._dense(node)
        if len(parts) < 2 and not self._is_by_number(node, parts):
            return
        if all(self.combined[v] for v in parts):
            self.mark(node.outs)
        elif node.role is Role.ELEMENTWISE and self._are_moved_from_one(parts):
            self.mark(node.outs)
            for value in parts:
                self.combined[value] = 1
            self.mark([self.origin[parts[0]]])

    def _scale(self, node: Node) -> None:
        """Notes where a multiple comes from: a stencil subtracts twice a value."""
        known = [v for v in node.ins if v in self.graph.constants]
        if node.name == "mul" and len(known) == 1:
            (part,) = (v for v in node.ins if v not in known)
            self.origin[node.outs[0]] = self.origin[part]

    def _are_moved_from_one(self, parts: list[int]) -> bool:
        return len(parts) > 1 and len({self.origin[v] for v in parts}) == 1

    def _is_by_number(self, node: Node, parts: list[int]) -> bool:
        """Whether all but one operand are scalars: what cancels later cancels still."""
        sizes = self.graph.sizes
        return len(parts) == 1 and all(v in parts or sizes[v] == 1 for v in node.ins)

    def _dense(self, node: Node) -> list[int]:
        return [v for v in dict.fromkeys(node.ins) if self.provenance.dense[v]]

    def mark(self, values: Iterable[int]) -> None:
        """Marks values, but no results of Compute: rounding these is what the policy asks for."""
        for value in values:
            if not self.computed[self.origin[value]]:
                self.combined[value] = 1


def find_self_combined(graph: Graph, provenance: Provenance, also: Iterable[int] = ()) -> bytearray:
    """Marks what is combined with itself, what it is made of, and what comes of it by more of that.

    A direct result of Compute is not marked: that it is rounded is what the policy asks for.

    Args:
      graph: the program.
      provenance: what is known of its values.
      also: what meets itself by a longer way: see offsets.py.
    """
    sweep = _SelfCombination(graph, provenance)
    for node in graph.nodes:
        sweep.forward(node)
    sweep.mark(also)
    if any(sweep.combined):
        for node in reversed(graph.nodes):
            sweep.backward(node)
        for node in graph.nodes:
            sweep.forward(node)
    return sweep.combined
