"""Find values combined with shifted parts of themselves: differences, scans, products.

`c[16:] - c[:-16]` of a running sum, pairwise differences, the products of decay factors in an
associative scan: the relative error of such a result can be much larger than that of the value.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.graph import Graph, Node, Role, movements

_OF_ONE = (Trait.EXACT, Trait.ROUNDED)  # signs, masks, scales and shifts of one array
_SUMS = (Trait.ROUNDED, Trait.SUM)  # `add_any`, a sum of cotangents, is a `SUM`


class _SelfCombination:
    """Sweeps that mark values that are combined with parts of themselves.

    Attributes:
      combined: per value, 1 if it is combined with itself.
      origin: the value from which each was moved: padded, rolled and sorted arrays have that of
        their source.
      computed: per value, 1 if Compute makes it.
    """

    def __init__(self, graph: Graph, provenance: Provenance) -> None:
        self.graph, self.provenance = graph, provenance
        self.combined = bytearray(len(graph.avals))
        self.origin = list(range(len(graph.avals)))
        self.computed = bytearray(len(graph.avals))

    def forward(self, node: Node) -> None:
        """Follow movement, and mark values that a node combines with parts of themselves."""
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
        """Propagate marks to what a marked value is moved or computed elementwise from."""
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
        """Return whether a node only moves or negates values; `sort` counts as movement."""
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
        """Record the origin of a known multiple: a stencil subtracts twice a value."""
        known = [v for v in node.ins if v in self.graph.constants]
        if node.name == "mul" and len(known) == 1:
            (part,) = (v for v in node.ins if v not in known)
            self.origin[node.outs[0]] = self.origin[part]

    def _are_moved_from_one(self, parts: list[int]) -> bool:
        return len(parts) > 1 and len({self.origin[v] for v in parts}) == 1

    def _is_by_number(self, node: Node, parts: list[int]) -> bool:
        """Return whether all operands but one are scalars: what cancels later still cancels."""
        sizes = self.graph.sizes
        return len(parts) == 1 and all(v in parts or sizes[v] == 1 for v in node.ins)

    def _dense(self, node: Node) -> list[int]:
        return [v for v in dict.fromkeys(node.ins) if self.provenance.dense[v]]

    def mark(self, values: Iterable[int]) -> None:
        """Mark values, except results of Compute: the policy asks for these to be rounded."""
        for value in values:
            if not self.computed[self.origin[value]]:
                self.combined[value] = 1


def find_self_combined(graph: Graph, provenance: Provenance, also: Iterable[int] = ()) -> bytearray:
    """Mark values that are combined with themselves, their sources and their results.

    A direct result of Compute is not marked: the policy asks for it to be rounded.

    Args:
      graph: the program.
      provenance: where each value comes from.
      also: values that cancel with functions of themselves; see `second_moments.py`.
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
