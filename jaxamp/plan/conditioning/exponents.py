"""Find stored values `x` of which `exp(x - y)` is computed, as the derivative of `logaddexp` is.

The absolute rounding error of `x` is the relative error of the exponential, however small the
difference. A fused reader takes `x` before it is rounded; what has to be in memory, for a
concatenation or a loop, is rounded.
"""

from __future__ import annotations

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.dataflow.regions import FusionRegions
from jaxamp.plan.graph.consumers import descendants
from jaxamp.plan.graph.graph import Graph, Node, Role


def find_exponents(graph: Graph, provenance: Provenance, regions: FusionRegions) -> set[int]:
    """Return values that are not fused and whose differences to others are exponents."""
    if "exp" not in graph.named:
        return set()
    chosen = {out: node for node in graph.named.get("select_n", ()) for out in node.outs}
    differences = (
        node
        for node in graph.named.get("sub", ())
        if exponentials_of_difference(graph, provenance, node)
    )
    pending = [v for node in differences for v in node.ins]
    found: set[int] = set()
    while pending:
        value = pending.pop()
        if value not in found:
            found.add(value)
            pending += chosen[value].ins if value in chosen else ()
    return {v for v in found if provenance.dense[v] and not regions.fused[v]}


def exponentials_of_difference(graph: Graph, provenance: Provenance, node: Node) -> list[int]:
    """Return the exponentials taken of a node's result, if it subtracts two activations."""
    if node.name != "sub" or not all(provenance.dense[v] for v in node.ins):
        return []
    near = descendants(graph, node.outs[0], _passes)
    return [r.outs[0] for v in near for r in graph.readers[v] if r.name == "exp"]


def _passes(node: Node) -> bool:
    return node.role is Role.MOVE or node.name == "select_n"
