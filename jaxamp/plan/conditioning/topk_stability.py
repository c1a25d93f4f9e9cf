"""What is put in order to pick an index: the experts that a router chooses, the nearest neighbours.

Numbers that are equal once they are rounded are taken in the order in which they stand. Of a
softmax that is nearly even, most of the large ones are.
"""

from __future__ import annotations

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.uses import Uses
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, movements

_AROUND = (Link.INIT, Link.BACK)


def find_topk_operands(graph: Graph, uses: Uses) -> frozenset[int]:
    """One sweep backward: where what is ordered comes from, if it is only moved."""
    ordered = {node.ins[0] for node in graph.nodes if _is_topk(graph, uses, node)}
    for node in reversed(graph.nodes) if ordered else ():
        if node.role is Role.MOVE:
            ordered.update(source for source, out in movements(node) if out in ordered)
        elif node.link not in (None, *_AROUND) and node.outs[0] in ordered:
            ordered.update(node.ins)
    return frozenset(ordered)


def _is_topk(graph: Graph, uses: Uses, node: Node) -> bool:
    """Whether a node puts all of an array in order, and something needs its places there."""
    if node.trait is not Trait.EXTREMUM:
        return False
    return any(graph.kinds[v] in "iu" and uses.needed[v] for v in node.outs[1:])
