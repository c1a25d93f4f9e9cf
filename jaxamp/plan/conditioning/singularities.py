"""Find values that must not be rounded onto a singularity, and divisors that may underflow.

A probability near one is one in 8 or 11 bits, and `log1p(-p)` of it infinite. The logarithm is
computed in float32 anyway. These are the values on the way to it that are stored because they are
sorted, gathered, stacked or joined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from jaxamp.core.formats import Precision
from jaxamp.core.intervals import magnitude
from jaxamp.core.semantics import Pole
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.conditioning.rescaled_products import FUSED
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.consumers import ADDS, descendants
from jaxamp.plan.graph.graph import Graph, Node, Role, is_apart, is_nonnegative
from jaxamp.plan.graph.sweeps import backward, column, forward, union

AT_ZERO, AT_NUMBER = 1, 2  # AT_NUMBER: at a nonzero number or at another value
AT_BOUND = 4  # undefined beyond the number: not even a sum may be rounded past it

MAY_UNDERFLOW = 1  # may be zero in float16: an exponential, a product of many
MAY_OVERFLOW = 2  # is divided by such a value, and may overflow float16

_ALGEBRAIC = (Trait.EXACT, Trait.ROUNDED, Trait.SUM, Trait.PREFIX, Trait.EXTREMUM)
_ROOTS = ("sqrt", "square", "cbrt")
_SINGULAR = {Pole.ZERO: AT_ZERO, Pole.NUMBER: AT_NUMBER | AT_BOUND}
_DIVIDING = ("div", "mul", "integer_pow")
_POWERS = ("integer_pow", "square", "sqrt", "cbrt")
_REDUCTIONS = (Trait.EXTREMUM, Trait.PREFIX, Trait.PRODUCT)
_ADDING = (*ADDS, "neg", "scatter-add", "reduce_sum")


def find_singularities(graph: Graph, small_divisors: bytearray) -> bytearray:
    """Sweep backward until nothing changes; Compute and smooth functions end the paths."""
    singularities = _Singularities(graph, small_divisors)
    for node in backward(graph, singularities.bits):
        singularities.enter(node)
    return singularities.bits


class _Singularities:
    """Flags per value: `AT_ZERO` where zero is singular, `AT_NUMBER` where another number is."""

    def __init__(self, graph: Graph, small_divisors: bytearray) -> None:
        self.graph, self.may_overflow = graph, column(small_divisors, MAY_OVERFLOW)
        self.bits = bytearray(len(graph.avals))

    def enter(self, node: Node) -> None:
        """Mark operands near a node's own singularity, and propagate the flags of its results."""
        if node.name in _DIVIDING:
            self._mark(self._divisors(node), AT_ZERO)
        if flags := _SINGULAR.get(node.semantics.pole):
            return self._mark(self._near(node), flags)
        if not (given := union(self.bits, node.outs)):
            return None
        if node.role is Role.MOVE:
            for source, out in node.moves:
                self._mark((source,), self.bits[out])
        elif node.name in ADDS:
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
        if node.name == "mul" and union(self.may_overflow, node.ins):
            others = tuple(v for v in node.ins if not self.may_overflow[v])
            return others if len(others) == len(node.ins) - 1 else ()
        return node.ins if node.eqn.params.get("y", 0) < 0 else ()

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


def find_small_divisors(graph: Graph, provenance: Provenance) -> bytearray:
    """Return, per value, whether it may underflow, or is a quotient of a divisor that may.

    A product of many probabilities is small in float32 and zero in float16, and a quotient by it
    overflows float16 before it is multiplied by something small.
    """
    bits = bytearray(len(graph.avals))
    for node in forward(graph, bits):
        if node.role is Role.MOVE:
            for source, out in node.moves:
                bits[out] = bits[source]
        elif node.role is Role.MERGE or node.role is Role.LINK:
            bits[node.outs[0]] |= union(bits, [v for v in node.ins if graph.is_float32[v]])
        elif node.role is Role.ELEMENTWISE or node.role is Role.REDUCE:
            found = _of(bits, node) | _is_beyond(graph, node) * MAY_OVERFLOW
            for out in node.outs if found else ():
                if provenance.dense[out]:
                    bits[out] |= found & _possible(graph, out)
    return bits


def _is_beyond(graph: Graph, node: Node) -> bool:
    """Return whether a negative power is beyond float16 at worst, as of Adam's `sqrt(v) + 1e-6`."""
    is_power = node.name == "integer_pow" and node.eqn.params["y"] < 0
    return is_power and Precision.F16.max < magnitude(graph.ranges[node.outs[0]]).high < math.inf


def _possible(graph: Graph, value: int) -> int:
    """Return the flags that a value's range leaves possible."""
    may_overflow = magnitude(graph.ranges[value]).high > Precision.F16.max
    return (not is_apart(graph, value)) * MAY_UNDERFLOW | may_overflow * MAY_OVERFLOW


def _of(bits: bytearray, node: Node) -> int:
    """Return what a result may be as one of its operands may be."""
    if node.semantics.decays:
        return MAY_UNDERFLOW
    if node.name == "div":
        return bits[node.ins[0]] | (bits[node.ins[1]] & MAY_UNDERFLOW and MAY_OVERFLOW)
    if node.name == "integer_pow":
        is_reciprocal = node.eqn.params["y"] < 0
        return bits[node.ins[0]] & MAY_UNDERFLOW and MAY_OVERFLOW if is_reciprocal else 0
    return union(bits, node.ins) if node.trait in _ALGEBRAIC or node.name in _ROOTS else 0


def find_divided(graph: Graph) -> frozenset[int]:
    """Return dividends of what may be as small as a number that is added to it, and their terms.

    In `sums / (counts + 1e-8)` a count may be zero: a cotangent is then 1e8 times as large, until
    a mask takes it away, and float16 ends before. What divides itself, as by its norm, is none.
    """
    tiny = {n.outs[0] for n in graph.named.get("add", ()) if any(_is_tiny(graph, v) for v in n.ins)}
    makers = {out: node for node in graph.nodes if tiny for out in node.outs}
    found = set[int]()
    for node in reversed(graph.nodes) if tiny else ():
        if node.name == "div" and graph.origin(node.ins[1]) in tiny:
            maker = makers.get(node.ins[0])
            found.update(node.ins[:1] if maker and not _divides_itself(graph, maker, node) else ())
        elif node.role is Role.MOVE:
            found.update(source for source, out in node.moves if out in found)
        elif node.name in _ADDING or node.role is Role.MERGE:
            found.update(node.ins if not found.isdisjoint(node.outs) else ())
    return frozenset(found)


def _divides_itself(graph: Graph, maker: Node, quotient: Node) -> bool:
    """Return whether what a dividend is, or is made of by one node, makes its divisor."""

    def passes(node: Node) -> bool:
        return node.role in FUSED and node.index < quotient.index

    own = (v for v in (*maker.ins, *maker.outs) if graph.is_float32[v])
    return any(quotient.ins[1] in descendants(graph, v, passes) for v in own)


def _is_tiny(graph: Graph, value: int) -> bool:
    """Return whether a value is a known number above zero whose reciprocal is beyond float16."""
    return 0 < graph.constants.get(value, 0.0) < 1 / Precision.F16.max
