"""Coordinates whose multiples are phases: each is taken at many frequencies, or at a high one.

`sin(2**k * x)`, a positional encoding of what a network has made: a rounding of `x` is a part of a
turn at the lowest frequency and many turns at the highest. Such a coordinate is small beside its
encoding, and a phase itself is fused.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, is_smaller, movements

_PERIODIC = ("sin", "cos", "tan")
_SHIFTS = ("add", "sub", "neg", "add_any")
_SCALES = ("mul", "div")
_HIGH = 16.0  # of this and higher ones a rounding is a good part of a radian

# What a value is: a phase; one by a factor that is no activation; one at several frequencies.
_PHASE, _SCALED, _COORDINATE = 1, 2, 4


def find_periodic_arguments(graph: Graph, provenance: Provenance) -> frozenset[int]:
    """One sweep backward: no coordinate is carried around a loop narrow."""
    if graph.named.keys().isdisjoint(_PERIODIC):
        return frozenset()
    arguments = _PeriodicArguments(graph, provenance)
    for node in reversed(graph.nodes):
        arguments.enter(node)
    return frozenset(v for v, bits in enumerate(arguments.bits) if bits & _COORDINATE)


class _PeriodicArguments:
    def __init__(self, graph: Graph, provenance: Provenance) -> None:
        self.graph, self.provenance = graph, provenance
        self.bits = bytearray(len(graph.avals))

    def enter(self, node: Node) -> None:
        """Marks what a node makes a phase of, and hands on what its results are marked as."""
        if node.name in _PERIODIC:
            return self._mark(node.ins, _PHASE)
        if node.role is Role.MOVE:
            for source, out in movements(node):
                self._mark((source,), self._of_moved(self.bits[out], source, out))
        elif node.outs and (given := self.bits[node.outs[0]]):
            self._propagate(node, given)
        return None

    def _propagate(self, node: Node, given: int) -> None:
        if node.name in _SHIFTS or node.role is Role.MERGE or self._is_forwarded(node):
            self._mark(node.ins, given)
        elif node.name in _SCALES and not all(self.provenance.dense[v] for v in node.ins):
            given |= self._of_scaled(node)
            for value in node.ins:
                self._mark((value,), self._of_moved(given, value, node.outs[0]))

    def _of_moved(self, given: int, source: int, out: int) -> int:
        """Of what is broadcast to be scaled, each number is taken at many frequencies."""
        sizes = self.graph.sizes
        if given & _SCALED and is_smaller(sizes[source], sizes[out]):
            return given | _COORDINATE
        return given

    def _of_scaled(self, node: Node) -> int:
        known = [abs(self.graph.constants[v]) for v in node.ins if v in self.graph.constants]
        if not known:
            return _SCALED
        frequency = 1 / known[0] if node.name == "div" and known[0] else known[0]
        return _COORDINATE if frequency >= _HIGH else 0

    def _is_forwarded(self, node: Node) -> bool:
        return node.role is Role.LINK and node.link not in (Link.INIT, Link.BACK)

    def _mark(self, values: Iterable[int], flags: int) -> None:
        for value in values:
            if self.provenance.dense[value]:
                self.bits[value] |= flags
