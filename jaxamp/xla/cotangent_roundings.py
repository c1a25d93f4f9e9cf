"""Sums of an activation and a broadcast parameter whose cotangent is rounded for both.

Such a sum is fused, so it is f32, and so is its cotangent. That goes two ways: to the activation,
rounded as the activation is stored, and to the parameter, folded over rows by another kernel.
Unless the fold reads the rounding as well, the f32 cotangent is written to memory for it.

So it is behind a batch norm whose result an exponential or the like reads, or several operations
(a leaky rectifier, `x * hard_sigmoid(x)`): the cotangent is folded over rows, read once more after
that, and too dear to be made twice.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from jaxamp.core.formats import Precision, is_narrow
from jaxamp.plan.dataflow.provenance import Facts
from jaxamp.plan.dataflow.regions import ARITHMETIC, COSTLY, folds_rows
from jaxamp.plan.decision import Echo
from jaxamp.plan.graph.flags import union
from jaxamp.plan.graph.graph import Graph, Node, Role, movements


def find_echoes(
    graph: Graph,
    facts: Facts,
    fresh: Sequence[int],
    stored: Sequence[Precision | None],
    biased: Set[int],
    narrow: Precision | None,
) -> dict[int, Echo]:
    """How the cotangent of each such sum is rounded.

    Args:
      graph: the program.
      facts: what is known of its values.
      fresh: boundary values, and what is only moved from them.
      stored: precision in which each value is stored.
      biased: sums that a convolution's kernel makes, of narrow numbers.
      narrow: precision of activations that are stored.
    """

    def is_spread(value: int, size: int) -> bool:
        return bool(fresh[value] or facts.layer[value]) and graph.sizes[value] != size

    spread = {
        out
        for node in graph.nodes
        if node.role is Role.MOVE
        for source, out in movements(node)
        if is_spread(source, graph.sizes[out])
    }
    echoes = {}
    normal = _find_normal(graph, facts, stored)
    for node in graph.nodes:
        is_wide = any(stored[v] is Precision.F32 or v in biased for v in node.outs)
        if node.name in ("add", "sub") and is_wide:
            size = graph.sizes[node.outs[0]]
            others = [v for v in node.ins if v not in spread and not is_spread(v, size)]
            whole = [v for v in others if facts.dense[v] and graph.sizes[v] == size]
            if len(others) == len(whole) == 1:
                is_normal = node.outs[0] in normal
                low = narrow if is_normal else stored[others[0]]
                if is_narrow(low):
                    echoes[node.outs[0]] = Echo(node.ins.index(others[0]), low, is_normal)
    return echoes


def _find_normal(graph: Graph, facts: Facts, stored: Sequence[Precision | None]) -> set[int]:
    """Fused values that are made of a fold over rows, and that something dear is made of."""
    folded, dear = bytearray(len(graph.avals)), bytearray(len(graph.avals))
    read = bytearray(len(graph.avals))  # whether a cotangent comes from elsewhere already
    for node in graph.nodes:
        if node.role is Role.REDUCE:
            is_folded = not folds_rows(graph, node)
        else:
            is_folded = node.role in ARITHMETIC and union(folded, node.ins)
        for value in node.outs if is_folded else ():
            folded[value] = stored[value] is Precision.F32
    for node in reversed(graph.nodes):
        if node.role not in ARITHMETIC or not _passes_cotangents(graph, facts, node):
            continue
        is_dear = node.trait in COSTLY or union(dear, node.outs)
        for value in dict.fromkeys(node.ins):
            if is_dear or read[value]:
                dear[value] = stored[value] is Precision.F32
            read[value] = 1
    return {v for v in range(len(graph.avals)) if folded[v] and dear[v]}


def _passes_cotangents(graph: Graph, facts: Facts, node: Node) -> bool:
    return bool(union(facts.dense, node.outs) and union(graph.ours, node.outs))
