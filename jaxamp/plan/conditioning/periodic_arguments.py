"""Find values that periodic functions read at many or high frequencies.

`sin(2**k * x)`, a positional encoding of an activation: a rounding of `x` is a fraction of a period
at the lowest frequency and many periods at the highest. Such an `x` is small beside its encoding,
and the argument of the sine itself is fused.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, is_smaller, movements

_PERIODIC = ("sin", "cos", "tan")
_SHIFTS = ("add", "sub", "neg", "add_any")
_SCALES = ("mul", "div")
_HIGH = 16.0  # frequency from which a rounding of 2**-8 is more than 1/16 of a radian

# Flags: argument of a periodic function; one scaled by no activation; one at several frequencies.
_ARGUMENT, _SCALED, _MANY_FREQUENCIES = 1, 2, 4


def find_periodic_arguments(graph: Graph, provenance: Provenance) -> frozenset[int]:
    """Return values whose multiples, at several or at high frequencies, are periodic arguments."""
    if graph.named.keys().isdisjoint(_PERIODIC):
        return frozenset()
    arguments = _PeriodicArguments(graph, provenance)
    for node in reversed(graph.nodes):
        arguments.enter(node)
    return frozenset(v for v, bits in enumerate(arguments.bits) if bits & _MANY_FREQUENCIES)


class _PeriodicArguments:
    """Backward sweep that marks arguments of periodic functions and what these are multiples of."""

    def __init__(self, graph: Graph, provenance: Provenance) -> None:
        self.graph, self.provenance = graph, provenance
        self.bits = bytearray(len(graph.avals))

    def enter(self, node: Node) -> None:
        """Mark the operands of a periodic function, and propagate the marks of a node's results."""
        if node.name in _PERIODIC:
            return self._mark(node.ins, _ARGUMENT)
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
        """Return the flags of a moved value: broadcast and scaled, it has many frequencies."""
        sizes = self.graph.sizes
        if given & _SCALED and is_smaller(sizes[source], sizes[out]):
            return given | _MANY_FREQUENCIES
        return given

    def _of_scaled(self, node: Node) -> int:
        known = [abs(self.graph.constants[v]) for v in node.ins if v in self.graph.constants]
        if not known:
            return _SCALED
        frequency = 1 / known[0] if node.name == "div" and known[0] else known[0]
        return _MANY_FREQUENCIES if frequency >= _HIGH else 0

    def _is_forwarded(self, node: Node) -> bool:
        return node.role is Role.LINK and node.link not in (Link.INIT, Link.BACK)

    def _mark(self, values: Iterable[int], flags: int) -> None:
        for value in values:
            if self.provenance.dense[value]:
                self.bits[value] |= flags
