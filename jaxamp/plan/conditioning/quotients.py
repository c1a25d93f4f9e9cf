"""Sums that are divided by sums: an attention that is normalised after its product with the values.

Either may be beyond float16 and their quotient is not. A norm is no such quotient: what it divides
by is made of the value itself, which is stored however large it is.
"""

from __future__ import annotations

from jaxamp.plan.dataflow.provenance import DENSE, STATISTIC, Provenance
from jaxamp.plan.graph.consumers import descendants, is_movement
from jaxamp.plan.graph.graph import Graph, Node, Role

_FUSED = (Role.ELEMENTWISE, Role.MOVE, Role.REDUCE, Role.MERGE)


def is_in_quotient(graph: Graph, provenance: Provenance, value: int) -> bool:
    """Whether a value, or what it is moved to, and another are divided."""
    readers = [r for v in descendants(graph, value, is_movement) for r in graph.readers[v]]
    quotients = [r for r in readers if _is_quotient(provenance, r)]
    if not quotients:
        return False
    made = set(descendants(graph, value, lambda node: node.role in _FUSED))
    return any(not made.issuperset(r.ins) for r in quotients)


def _is_quotient(provenance: Provenance, node: Node) -> bool:
    """Whether a node divides what is computed from activations by what is."""
    return node.name == "div" and all(provenance.bits[v] & (DENSE | STATISTIC) for v in node.ins)
