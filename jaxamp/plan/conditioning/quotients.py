"""Find sums that are divided by sums, as in an attention normalized after its product with V.

Either sum may overflow float16 where the quotient does not. A norm is no such quotient: its divisor
is computed from the dividend, which is stored however large it is.
"""

from __future__ import annotations

from jaxamp.plan.dataflow.provenance import DENSE, STATISTIC, Provenance
from jaxamp.plan.graph.consumers import descendants, is_movement
from jaxamp.plan.graph.graph import Graph, Node, Role

_FUSED = (Role.ELEMENTWISE, Role.MOVE, Role.REDUCE, Role.MERGE)


def is_in_quotient(graph: Graph, provenance: Provenance, value: int) -> bool:
    """Return whether a value is dividend or divisor beside another value not computed from it."""
    readers = [r for v in descendants(graph, value, is_movement) for r in graph.readers[v]]
    quotients = [r for r in readers if _is_quotient(provenance, r)]
    if not quotients:
        return False
    made = set(descendants(graph, value, lambda node: node.role in _FUSED))
    return any(not made.issuperset(r.ins) for r in quotients)


def _is_quotient(provenance: Provenance, node: Node) -> bool:
    """Return whether a node divides one value computed from activations by another."""
    return node.name == "div" and all(provenance.bits[v] & (DENSE | STATISTIC) for v in node.ins)
