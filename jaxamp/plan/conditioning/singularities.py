"""Find values that must not be rounded onto a singularity of a function of them.

A probability near one is one in 8 or 11 bits, and `log1p(-p)` of it infinite. The logarithm is
computed in float32 anyway. These are the values on the way to it that are stored because they are
sorted, gathered, stacked or joined.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxamp.core.semantics import Pole, semantics_of
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.conditioning.small_divisors import MAY_OVERFLOW
from jaxamp.plan.graph.flags import union
from jaxamp.plan.graph.graph import Graph, Node, Role, is_apart, is_nonnegative, movements
from jaxamp.plan.graph.sweeps import backward

AT_ZERO, AT_NUMBER = 1, 2  # AT_NUMBER: at a nonzero number or at another value
AT_BOUND = 4  # undefined beyond the number: not even a sum may be rounded past it

_SINGULAR = {Pole.ZERO: AT_ZERO, Pole.NUMBER: AT_NUMBER | AT_BOUND}
_SUMS = ("add", "sub", "add_any")
_POWERS = ("integer_pow", "square", "sqrt", "cbrt")
_REDUCTIONS = (Trait.EXTREMUM, Trait.PREFIX, Trait.PRODUCT)


def find_singularities(graph: Graph, small_divisors: bytearray) -> bytearray:
    """Sweep backward until nothing changes; Compute and smooth functions end the paths."""
    singularities = _Singularities(graph, small_divisors)
    for node in backward(graph, singularities.bits):
        singularities.enter(node)
    return singularities.bits


class _Singularities:
    """Flags per value: `AT_ZERO` where zero is singular, `AT_NUMBER` where another number is."""

    def __init__(self, graph: Graph, small_divisors: bytearray) -> None:
        self.graph, self.small_divisors = graph, small_divisors
        self.bits = bytearray(len(graph.avals))

    def enter(self, node: Node) -> None:
        """Mark operands near a node's own singularity, and propagate the flags of its results."""
        self._mark(self._divisors(node), AT_ZERO)
        if flags := _SINGULAR.get(semantics_of(node.name, node.op).pole):
            return self._mark(self._near(node), flags)
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
        """Return a node's divisors, and factors of a quotient that may overflow."""
        if node.name == "div":
            return node.ins[1:]
        if (
            node.name == "mul"
            and len(quotients := [v for v in node.ins if self._may_overflow(v)]) == 1
        ):
            return tuple(v for v in node.ins if v not in quotients)
        return node.ins if node.name == "integer_pow" and node.eqn.params["y"] < 0 else ()

    def _may_overflow(self, value: int) -> bool:
        return bool(self.small_divisors[value] & MAY_OVERFLOW)

    def _near(self, node: Node) -> list[int]:
        """Return the operands that may be at the singularity; that of `log1p` is below zero."""
        is_below = node.name == "log1p"
        return [v for v in node.ins if not (is_below and is_nonnegative(self.graph, v))]

    def _of_sum(self, node: Node, given: int) -> int:
        """Return the flags of a sum's terms: those of either sign may cancel to zero."""
        if node.name == "sub" or not all(is_nonnegative(self.graph, v) for v in node.ins):
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
                self.bits[value] |= flags & ~AT_ZERO if is_apart(self.graph, value) else flags
