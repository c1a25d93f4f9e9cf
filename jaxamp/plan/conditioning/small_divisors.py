"""Find quotients whose divisor may underflow: they may overflow float16.

A product of many probabilities is small in float32 and zero in float16, and a quotient by it
overflows float16 before it is multiplied by something small.
"""

from __future__ import annotations

from jaxamp.core.formats import Precision
from jaxamp.core.intervals import magnitude
from jaxamp.core.semantics import semantics_of
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.flags import union
from jaxamp.plan.graph.graph import Graph, Node, Role, is_apart, movements
from jaxamp.plan.graph.sweeps import forward

MAY_UNDERFLOW = 1  # may be zero in float16: an exponential, a product of many
MAY_OVERFLOW = 2  # is divided by such a value, and may overflow float16

_ALGEBRAIC = (Trait.EXACT, Trait.ROUNDED, Trait.SUM, Trait.PREFIX, Trait.EXTREMUM)
_ROOTS = ("sqrt", "square", "cbrt")


def find_small_divisors(graph: Graph, provenance: Provenance) -> bytearray:
    """Return the flags of each value."""
    bits = bytearray(len(graph.avals))
    for node in forward(graph, bits):
        if node.role is Role.MOVE:
            for source, out in movements(node):
                bits[out] = bits[source]
        elif node.role is Role.MERGE or node.role is Role.LINK:
            bits[node.outs[0]] |= union(bits, [v for v in node.ins if graph.is_float32[v]])
        elif node.role is Role.ELEMENTWISE or node.role is Role.REDUCE:
            for out in node.outs:
                if provenance.dense[out]:
                    bits[out] |= _of(bits, node) & _possible(graph, out)
    return bits


def _possible(graph: Graph, value: int) -> int:
    """Return the flags that a value's range leaves possible."""
    may_overflow = magnitude(graph.ranges[value]).high > Precision.F16.max
    return (not is_apart(graph, value)) * MAY_UNDERFLOW | may_overflow * MAY_OVERFLOW


def _of(bits: bytearray, node: Node) -> int:
    """Return what a result may be as one of its operands may be."""
    if semantics_of(node.name, node.op).decays:
        return MAY_UNDERFLOW
    if node.name == "div":
        return bits[node.ins[0]] | (bits[node.ins[1]] & MAY_UNDERFLOW and MAY_OVERFLOW)
    if node.name == "integer_pow":
        is_reciprocal = node.eqn.params["y"] < 0
        return bits[node.ins[0]] & MAY_UNDERFLOW and MAY_OVERFLOW if is_reciprocal else 0
    return union(bits, node.ins) if node.trait in _ALGEBRAIC or node.name in _ROOTS else 0
