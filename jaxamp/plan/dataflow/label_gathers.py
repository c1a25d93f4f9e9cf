"""Find gathers of single numbers from an activation: logits of labels, values of actions.

A cross-entropy reads its logits twice, whole and at the labels, and where the model is right the
two cotangents nearly cancel. They have to be added before either is rounded: the gather joins the
fused group of the other readers. Its result, one number per row, is small.
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
