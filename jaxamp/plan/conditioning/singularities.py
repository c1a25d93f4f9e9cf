"""Values that must not be rounded to a number at which something made of them is infinite.

A probability near one is one in 8 or 11 bits, and `log1p(-p)` of it infinite. The logarithm is in
float32 anyway. What is looked for here are the values that lead to it and are stored in between,
because they were sorted, gathered, stacked or joined on the way.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.magnitudes import MAY_OVERFLOW, NONNEGATIVE, NONZERO
from jaxamp.plan.graph.flags import union
from jaxamp.plan.graph.graph import Graph, Node, Role, movements
from jaxamp.plan.graph.sweeps import backward

AT_ZERO, AT_NUMBER = 1, 2  # AT_NUMBER: at a number that is not zero, or at another value
AT_BOUND = 4  # beyond the number there is nothing: not even a sum may be rounded past it

_SINGULAR = {
    **dict.fromkeys(("log", "log2", "rsqrt", "digamma", "lgamma"), AT_ZERO),
    **dict.fromkeys(("log1p", "atanh", "acos", "asin", "acosh", "erf_inv"), AT_NUMBER | AT_BOUND),
}
_SUMS = ("add", "sub", "add_any")
_POWERS = ("integer_pow", "square", "sqrt", "cbrt")
_REDUCTIONS = (Trait.EXTREMUM, Trait.PREFIX, Trait.PRODUCT)


def find_singularities(graph: Graph, magnitudes: bytearray) -> bytearray:
    """Sweeps backward until nothing changes, and stops at Compute and at curves."""
    singularities = _Singularities(graph, magnitudes)
    for node in backward(graph, singularities.bits):
        singularities.enter(node)
    return singularities.bits


class _Singularities:
    """Flags per value: AT_ZERO on what must not become zero, AT_NUMBER on the rest."""

    def __init__(self, graph: Graph, magnitudes: bytearray) -> None:
        self.graph, self.magnitudes = graph, magnitudes
        self.bits = bytearray(len(graph.avals))

    def enter(self, node: Node) -> None:
        """Marks what a node has a pole at, and hands on what its results are marked as."""
        self._mark(self._divisors(node), AT_ZERO)
        if node.name in _SINGULAR:
            return self._mark(self._near(node), _SINGULAR[node.name])
        if not (given := union(self.bits, node.outs)):
            return None
        if node.role is Role.MOVE:
            for source, out in movements(node):
                self._mark((source,), self.bits[out])
        elif node.name in _SUMS:
            self._mark(node.ins, self._of_sum(node, given))
        elif node.name == "one_minus_square":
            self._mark(node.ins, AT_NUMBER)
        elif node.name == "div":
            self._mark(node.ins[:1], given)
        elif self._propagates(node, given):
            self._mark(node.ins, given)
        return None

    def _divisors(self, node: Node) -> tuple[int, ...]:
        """What a node divides by, or multiplies by what was divided by something small."""
        if node.name == "div":
            return node.ins[1:]
        if (
            node.name == "mul"
            and len(quotients := [v for v in node.ins if self._may_overflow(v)]) == 1
        ):
            return tuple(v for v in node.ins if v not in quotients)
        return node.ins if node.name == "integer_pow" and node.eqn.params["y"] < 0 else ()

    def _may_overflow(self, value: int) -> bool:
        return bool(self.magnitudes[value] & MAY_OVERFLOW)

    def _near(self, node: Node) -> list[int]:
        """What a curve reads that may be at its pole; that of `log1p` is below zero."""
        beyond = NONNEGATIVE if node.name == "log1p" else 0
        return [v for v in node.ins if not self.magnitudes[v] & beyond]

    def _of_sum(self, node: Node, given: int) -> int:
        """Where terms may not be, if their sum may not: it is zero where they cancel."""
        if node.name == "sub" or not all(self.magnitudes[v] & NONNEGATIVE for v in node.ins):
            return AT_NUMBER | given & AT_BOUND
        return given

    def _propagates(self, node: Node, given: int) -> bool:
        if node.role is Role.ELEMENTWISE:
            return node.trait in (Trait.EXACT, Trait.ROUNDED) or node.name in _POWERS
        if node.role is Role.REDUCE:
            return node.trait in _REDUCTIONS or (node.trait is Trait.SUM and bool(given & AT_BOUND))
        return node.role is Role.MERGE or node.role is Role.LINK

    def _mark(self, values: Iterable[int], flags: int) -> None:
        for value in values:
            if self.graph.is_float32[value]:
                self.bits[value] |= flags & ~AT_ZERO if self.magnitudes[value] & NONZERO else flags
