"""Find gathers from activations: of single numbers, and of rows that are read many times.

A cross-entropy reads its logits twice, whole and at the labels, and where the model is right the
two cotangents nearly cancel. They have to be added before either is rounded: the gather joins the
fused group of the other readers. Its result, one number per row, is small.

What is read many times, as messages in a graph network are, is read from memory. Each reading has a
cotangent: summed in a narrow format, a long sum stops growing.
"""

from __future__ import annotations

import math
from typing import Any

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.graph import Graph, Node, is_smaller


def is_label_gather(graph: Graph, provenance: Provenance, node: Node) -> bool:
    """Return whether a node gathers single numbers of an activation, at most half of them."""
    if node.name != "gather" or set(node.eqn.params["slice_sizes"]) != {1}:
        return False
    table, (found,) = node.ins[0], node.outs
    return bool(provenance.dense[table]) and _is_half(graph.sizes[found], graph.sizes[table])


def is_label_scatter(graph: Graph, node: Node) -> bool:
    """Return whether a node scatters few numbers into zeros: the transpose of a label gather."""
    if node.name != "scatter-add" or graph.constants.get(node.ins[0]) != 0:
        return False
    return _is_half(graph.sizes[node.ins[2]], graph.sizes[node.outs[0]])


def gathers_whole_table(graph: Graph, node: Node) -> bool:
    """Return whether a gather takes the whole table as one slice: `x[:, 0]` of one column."""
    if node.name != "gather":
        return False
    size = graph.sizes[node.ins[0]]
    return math.prod(node.eqn.params["slice_sizes"]) == graph.sizes[node.outs[0]] == size


def _is_half(part: Any, whole: Any) -> bool:
    return is_smaller(2 * part, whole + 1)


def is_repeated_gather(graph: Graph, node: Node) -> bool:
    """Return whether a gather's result is no smaller than its table: too costly to fuse."""
    if node.name != "gather" or gathers_whole_table(graph, node):
        return False
    table, found = graph.sizes[node.ins[0]], graph.sizes[node.outs[0]]
    return table != 1 and not is_smaller(found, table)


def sums_many_cotangents(graph: Graph, node: Node) -> bool:
    """Return whether a gather may read one number often, so that many cotangents are summed."""
    return is_repeated_gather(graph, node) and not node.eqn.params["unique_indices"]
