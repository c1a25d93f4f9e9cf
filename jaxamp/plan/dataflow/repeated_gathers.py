"""Rows of activations that are looked up many times, as messages in a graph are.

What is read that often is read from memory. Its cotangents are as many as its readers: in a narrow
format their sum stops growing.
"""

from __future__ import annotations

from jaxamp.plan.dataflow.label_gathers import gathers_whole_table
from jaxamp.plan.graph.graph import Graph, Node, is_smaller


def is_repeated_gather(graph: Graph, node: Node) -> bool:
    """Whether a lookup leaves no less than it takes: to make that for each place is too dear."""
    if node.name != "gather" or gathers_whole_table(graph, node):
        return False
    table, found = graph.sizes[node.ins[0]], graph.sizes[node.outs[0]]
    return table != 1 and not is_smaller(found, table)


def sums_many_cotangents(graph: Graph, node: Node) -> bool:
    """Whether a lookup may hand out one number many times, so that many cotangents meet there."""
    return is_repeated_gather(graph, node) and not node.eqn.params["unique_indices"]
