"""Find reductions that take a pass over memory of their own, so that saving them pays.

XLA fuses a reduction of rows with its readers: a softmax is one kernel, and recomputing its sums
costs nothing. A reduction of other axes is a kernel by itself. So are two reductions of rows that
read one array side by side, as those of a variance by the mean of squares: they share a kernel that
writes nothing else.

See: ``python -m benchmarks.techniques --target h200 --only all saved-statistics``, JAX 0.10.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.dataflow.regions import reduces_rows
from jaxamp.plan.graph.graph import Graph, Node, Role

_MOST = 8
"""Values between a reduction and memory: a bound on the walk.

No model of ``benchmarks.deviceless``, at its small size, becomes another program with 4 or 1000
(forward and both gradients, bfloat16, JAX 0.10.2, 25 November 2026).
"""


def find_statistics(
    graph: Graph, provenance: Provenance, fusible: bytearray, levels: Sequence[int]
) -> bytearray:
    """Mark, per node, the reductions that are worth saving."""
    statistics = bytearray(len(graph.nodes))
    reductions = [n for n in graph.nodes if n.role is Role.REDUCE and fusible[n.index]]
    for node in reductions:
        statistics[node.index] = not reduces_rows(graph, node)
    rows = [node for node in reductions if not statistics[node.index]]
    if len(rows) > 1:
        maker = {v: n for n in graph.nodes if fusible[n.index] for v in n.outs}
        read = {node: _read(graph, provenance, maker, levels, node) for node in rows}
        # XLA merges equal reductions (common subexpressions).
        different = {(node.name, node.ins): parts for node, parts in read.items()}
        readers = Counter(part for parts in different.values() for part in parts)
        for node, parts in read.items():
            statistics[node.index] = any(readers[part] > 1 for part in parts)
    return statistics


def _read(
    graph: Graph,
    provenance: Provenance,
    maker: dict[int, Node],
    levels: Sequence[int],
    reduction: Node,
) -> set[tuple[int, int]]:
    """Return what a reduction reads in its kernel, and when; nothing behind another one."""
    here = levels[reduction.outs[0]]
    found: set[int] = set()
    pending = list(reduction.ins)
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
