"""Find gathers that read rows of activations many times, as messages in a graph network do.

What is read that often is read from memory. Each reading has a cotangent: summed in a narrow
format, a long sum stops growing.
"""

from __future__ import annotations

from jaxamp.plan.dataflow.label_gathers import gathers_whole_table
from jaxamp.plan.graph.graph import Graph, Node, is_smaller


def is_repeated_gather(graph: Graph, node: Node) -> bool:
    """Return whether a gather's result is no smaller than its table: too costly to fuse."""
    if node.name != "gather" or gathers_whole_table(graph, node):
        return False
    table, found = graph.sizes[node.ins[0]], graph.sizes[node.outs[0]]
    return table != 1 and not is_smaller(found, table)


def sums_many_cotangents(graph: Graph, node: Node) -> bool:
    """Return whether a gather may read one number often, so that many cotangents are summed."""
    return is_repeated_gather(graph, node) and not node.eqn.params["unique_indices"]
