"""Single numbers that are looked up in an activation: the logits of labels, the values of actions.

A cross-entropy reads its logits twice, whole and at the labels, and where the model is right the
two cotangents nearly cancel. So they have to meet before either is rounded: the lookup belongs to
the fused group of the other readers, and what it finds, a number of each row, is small.
"""

from __future__ import annotations

import math
from typing import Any

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.graph import Graph, Node, is_smaller


def is_label_gather(graph: Graph, provenance: Provenance, node: Node) -> bool:
    """Whether a node looks up single numbers of an activation, and leaves more than it takes."""
    if node.name != "gather" or set(node.eqn.params["slice_sizes"]) != {1}:
        return False
    table, (found,) = node.ins[0], node.outs
    return bool(provenance.dense[table]) and _is_half(graph.sizes[found], graph.sizes[table])


def is_label_scatter(graph: Graph, node: Node) -> bool:
    """Whether a node puts a few numbers into zeros, as the backward pass of such a lookup does."""
    if node.name != "scatter-add" or graph.constants.get(node.ins[0]) != 0:
        return False
    return _is_half(graph.sizes[node.ins[2]], graph.sizes[node.outs[0]])


def gathers_whole_table(graph: Graph, node: Node) -> bool:
    """Whether a lookup takes the whole table as one slice, as `found[:, 0]` does of one column."""
    if node.name != "gather":
        return False
    size = graph.sizes[node.ins[0]]
    return math.prod(node.eqn.params["slice_sizes"]) == graph.sizes[node.outs[0]] == size


def _is_half(part: Any, whole: Any) -> bool:
    return is_smaller(2 * part, whole + 1)
