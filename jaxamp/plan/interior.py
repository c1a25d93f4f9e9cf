"""Which values are never stored: the insides of fused chains and of reduction islands.

XLA fuses elementwise operations and reductions, so a value that only they read costs no memory
traffic in f32. A softmax or a norm is then f32 inside and rounded once, at its edge, without
anybody having recognised a softmax.
"""

from __future__ import annotations

from jaxamp.plan.facts import Facts
from jaxamp.plan.graph import Graph, Node, Role

_ARITHMETIC = (Role.ELEMENTWISE, Role.MOVE)
_FREE_READERS = (Role.REDUCE, Role.FIXED, Role.CONVERT)


def find_interior(graph: Graph, facts: Facts) -> bytearray:
    """Marks values whose readers all take f32 at no cost; they are not rounded.

    A value is interior when its only reader is elementwise, or when every reader folds it, brings
    a statistic back onto it, or makes an interior value of it.
    """
    interior = bytearray(len(graph.avals))
    # Readers come after what they read, but over a loop's edge, where values are stored anyway.
    for node in reversed(graph.nodes):
        if node.role in _ARITHMETIC:
            for value in node.outs:
                interior[value] = graph.ours[value] and _is_interior(graph, facts, interior, value)
    return interior


def _is_interior(graph: Graph, facts: Facts, interior: bytearray, value: int) -> bool:
    readers = graph.uses[value]
    if not readers or value in graph.outputs or value in graph.onward:
        return False
    if len(readers) == 1 and readers[0].role is Role.ELEMENTWISE:
        return True
    return all(_takes_f32(graph, facts, interior, reader) for reader in readers)


def _takes_f32(graph: Graph, facts: Facts, interior: bytearray, reader: Node) -> bool:
    if reader.role in _FREE_READERS:
        return True
    if reader.role not in _ARITHMETIC:
        return False
    if reader.role is Role.ELEMENTWISE and any(facts.statistic[v] for v in reader.ins):
        return True
    return all(interior[v] or not graph.ours[v] for v in reader.outs)
