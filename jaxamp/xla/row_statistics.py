"""Which folds are a pass over memory of their own, so that what they give is worth keeping.

XLA fuses a fold of rows with what reads it: a softmax is one kernel, and computing its sums again
costs nothing. A fold of other axes is a kernel by itself. So are two folds of rows that read one
array side by side, as those of a variance by the mean of squares: they share a kernel that writes
nothing but the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.dataflow.regions import reduces_rows
from jaxamp.plan.graph.graph import Graph, Node, Role

_MOST = 8  # values between a fold and what is in memory; more are no mere preparation


def find_statistics(
    graph: Graph, provenance: Provenance, fusible: bytearray, levels: Sequence[int]
) -> bytearray:
    """Marks the folds that are worth keeping, per node."""
    statistics = bytearray(len(graph.nodes))
    folds = [n for n in graph.nodes if n.role is Role.REDUCE and fusible[n.index]]
    for node in folds:
        statistics[node.index] = not reduces_rows(graph, node)
    rows = [node for node in folds if not statistics[node.index]]
    if len(rows) > 1:
        maker = {v: n for n in graph.nodes if fusible[n.index] for v in n.outs}
        read = {node: _read(graph, provenance, maker, levels, node) for node in rows}
        # Of folds that are one and the same XLA makes one.
        different = {(node.name, node.ins): parts for node, parts in read.items()}
        readers = Counter(part for parts in different.values() for part in parts)
        for node, parts in read.items():
            statistics[node.index] = any(readers[part] > 1 for part in parts)
    return statistics


def _read(
    graph: Graph, provenance: Provenance, maker: dict[int, Node], levels: Sequence[int], fold: Node
) -> set[tuple[int, int]]:
    """What a fold is made of in its own kernel, and when; nothing if another fold is part of it."""
    here = levels[fold.outs[0]]
    found: set[int] = set()
    pending = list(fold.ins)
    while pending and len(found) < _MOST:
        value = pending.pop()
        if value in found or value in graph.constants:
            continue
        found.add(value)
        node = maker.get(value)
        if node is not None and levels[value] == here:
            if node.role is Role.REDUCE:
                return set()
            pending += node.ins
    return {(here, value) for value in found if provenance.dense[value]}
