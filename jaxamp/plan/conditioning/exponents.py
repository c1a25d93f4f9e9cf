"""Find exponentials `exp(x - y)` of differences, as in the derivative of `logaddexp`.

The absolute rounding error of `x` is the relative error of the exponential, however small the
difference. A fused reader takes `x` before it is rounded.
"""

from __future__ import annotations

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.consumers import descendants
from jaxamp.plan.graph.graph import Graph, Node, Role


def exponentials_of_difference(graph: Graph, provenance: Provenance, node: Node) -> list[int]:
    """Return the exponentials taken of a node's result, if it subtracts two activations."""
    if node.name != "sub" or not all(provenance.dense[v] for v in node.ins):
        return []
    near = descendants(graph, node.outs[0], _passes)
    return [r.outs[0] for v in near for r in graph.readers[v] if r.name == "exp"]


def _passes(node: Node) -> bool:
    return node.role is Role.MOVE or node.name == "select_n"
