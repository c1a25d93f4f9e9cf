"""Rows of activations that are looked up many times, as messages in a graph are.

What is read that often is read from memory. Its cotangents are as many as its readers: in a narrow
format their sum stops growing.
"""

from __future__ import annotations

from jaxamp.plan.dataflow.label_gathers import takes_all
from jaxamp.plan.graph.graph import Graph, Node, is_smaller


def repeats(graph: Graph, node: Node) -> bool:
    """Whether a lookup leaves no less than it takes: to make that for each place is too dear."""
    if node.name != "gather" or takes_all(graph, node):
        return False
    table, found = graph.sizes[node.ins[0]], graph.sizes[node.outs[0]]
    return table != 1 and not is_smaller(found, table)


def meets(graph: Graph, node: Node) -> bool:
    """Whether a lookup may hand out one number many times, so that many cotangents meet there."""
    return repeats(graph, node) and not node.eqn.params["unique_indices"]
