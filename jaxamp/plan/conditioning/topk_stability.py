"""Find values that are ordered to select indices: experts of a router, nearest neighbors.

Numbers that are equal once rounded are selected in the order of their positions. In a nearly
uniform softmax most of the largest are.
"""

from __future__ import annotations

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.uses import Uses
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, movements

_AROUND = (Link.INIT, Link.BACK)


def find_topk_operands(graph: Graph, uses: Uses) -> frozenset[int]:
    """Return the operands of sorts whose indices are used, and the values these are moved from."""
    ordered = {node.ins[0] for node in graph.nodes if _is_topk(graph, uses, node)}
    for node in reversed(graph.nodes) if ordered else ():
        if node.role is Role.MOVE:
            ordered.update(source for source, out in movements(node) if out in ordered)
        elif node.link not in (None, *_AROUND) and node.outs[0] in ordered:
            ordered.update(node.ins)
    return frozenset(ordered)


def _is_topk(graph: Graph, uses: Uses, node: Node) -> bool:
    """Return whether a node orders an array and the resulting indices are needed."""
    if node.trait is not Trait.EXTREMUM:
        return False
    return any(graph.kinds[v] in "iu" and uses.needed[v] for v in node.outs[1:])
