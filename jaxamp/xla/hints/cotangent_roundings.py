"""Find sums of an activation and a broadcast parameter whose cotangent is rounded for both.

Such a sum is fused, so it is float32, and so is its cotangent. The cotangent has two readers: the
activation's, which is rounded as the activation is stored, and the parameter's, which another
kernel reduces over rows. Unless the reduction reads the rounding as well, the float32 cotangent is
written to memory for it.

The same holds behind a batch norm that is read by an exponential or the like, or by several
operations (a leaky ReLU, `x * hard_sigmoid(x)`): the cotangent is reduced over rows, read again
after that, and too costly to be computed twice. And it holds for a sum of several activations, each
times a parameter of its own, such as a convolution written as shifted taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxamp.core.formats import Precision, is_narrow
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.dataflow.regions import ARITHMETIC, COSTLY, reduces_rows
from jaxamp.plan.decision import CotangentRounding
from jaxamp.plan.findings import Findings
from jaxamp.plan.graph.consumers import find_parts
from jaxamp.plan.graph.graph import Graph, Node, Role
from jaxamp.plan.graph.sweeps import union

_SUMS = ("add", "sub")


def find_cotangent_roundings(findings: Findings) -> dict[int, CotangentRounding]:
    """Return how the cotangent of each such sum is rounded."""
    graph, provenance, stored = findings.graph, findings.provenance, findings.stored
    own_cast, bias_sums = findings.readings.own_cast, findings.regions.bias_sums

    def is_smaller(value: int, size: int) -> bool:
        return bool(own_cast[value] or provenance.layer[value]) and graph.sizes[value] != size

    spread = {
        out
        for node in graph.nodes
        if node.role is Role.MOVE
        for source, out in node.moves
        if is_smaller(source, graph.sizes[out])
    }

    def others(node: Node) -> list[int]:
        """Return the operands that are no parameters broadcast along what the node computes."""
        size = graph.sizes[node.outs[0]]
        return [v for v in node.ins if v not in spread and not is_smaller(v, size)]

    roundings = {}
    normalized = _find_normalized(graph, provenance, stored)
    scaled = _find_scaled_sums(graph, provenance, others)
    for node in graph.nodes:
        is_wide = any(stored[v] is Precision.F32 or v in bias_sums for v in node.outs)
        if node.name not in _SUMS or not is_wide:
            continue
        (out,), found = node.outs, others(node)
        whole = [v for v in found if provenance.dense[v] and graph.sizes[v] == graph.sizes[out]]
        if out in scaled or len(found) == len(whole) == 1:
            is_multiplied = out in scaled or out in normalized
            low = findings.narrow if is_multiplied else stored[whole[0]]
            if is_narrow(low):
                roundings[out] = CotangentRounding(node.ins.index(whole[0]), low, is_multiplied)
    return roundings


def _find_scaled_sums(
    graph: Graph, provenance: Provenance, others: Callable[[Node], list[int]]
) -> set[int]:
    """Return whole sums of activations of which several are scaled by parameters of their own."""

    def scaled(node: Node) -> tuple[int, ...] | None:
        factors = [provenance.dense[v] for v in others(node)] if node.name == "mul" else []
        return node.outs if factors == [1] else None

    parts = find_parts(graph, scaled, lambda node: node.name in _SUMS)
    added = {v for node in graph.nodes if node.name in _SUMS for v in node.ins}
    return {v for v, found in parts.items() if len(found) > 1 and v not in added}


def _find_normalized(
    graph: Graph, provenance: Provenance, stored: Sequence[Precision | None]
) -> set[int]:
    """Return fused values that depend on a reduction over rows, and that costly operations read."""
    reduced, costly = bytearray(len(graph.avals)), bytearray(len(graph.avals))
    read = bytearray(len(graph.avals))  # whether a cotangent comes from elsewhere already
    for node in graph.nodes:
        if node.role is Role.REDUCE:
            is_reduced = not reduces_rows(graph, node)
        else:
            is_reduced = node.role in ARITHMETIC and union(reduced, node.ins)
        for value in node.outs if is_reduced else ():
            reduced[value] = stored[value] is Precision.F32
    for node in reversed(graph.nodes):
        if node.role not in ARITHMETIC or not _passes_cotangents(graph, provenance, node):
            continue
        is_costly = node.trait in COSTLY or union(costly, node.outs)
        for value in dict.fromkeys(node.ins):
            if is_costly or read[value]:
                costly[value] = stored[value] is Precision.F32
            read[value] = 1
    return {v for v in range(len(graph.avals)) if reduced[v] and costly[v]}


def _passes_cotangents(graph: Graph, provenance: Provenance, node: Node) -> bool:
    return bool(union(provenance.dense, node.outs) and union(graph.is_float32, node.outs))
