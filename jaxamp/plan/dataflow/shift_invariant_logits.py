"""Find logits that are larger than their operands and read only relative to their maximum.

The logits of a large vocabulary: a loss subtracts each row's maximum before it sums anything. No
later Compute reads them, so that arithmetic gains nothing from a narrow format; memory does. They
are the largest array of the program, written once and read in each direction, and one rounding of
them is no more than what attention scores tolerate.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.graph.graph import Graph, Node, is_smaller


def outweighs_operands(graph: Graph, node: Node) -> bool:
    """Return whether a contraction's result is known to be larger than its operands together."""
    return is_smaller(sum(graph.sizes[v] for v in node.ins), graph.sizes[node.outs[0]])


def is_shift_invariant(graph: Graph, value: int) -> bool:
    """Return whether a value is read only for its extremes and for its distance to them.

    Before, it may be moved, scaled, masked or mapped elementwise.
    """
    rows, extremes = set[int](), set[int]()  # the value as it is mapped elementwise; its extremes
    pending: list[int] = []
    _mark(graph, rows, (value,), pending)
    shifted, last = False, -1
    while pending:
        index = heapq.heappop(pending)
        if index == last:
            continue
        last, node = index, graph.nodes[index]
        reads_rows = not rows.isdisjoint(node.ins)
        is_elementwise = node.is_elementwise and node.trait is not Trait.SENSITIVE
        if reads_rows and node.name == "sub" and not extremes.isdisjoint(node.ins):
            shifted = True
        elif (reads_rows and node.trait is Trait.EXTREMUM) or (is_elementwise and not reads_rows):
            _mark(graph, extremes, node.outs, pending)
        elif reads_rows and is_elementwise:
            _mark(graph, rows, node.outs, pending)
        elif reads_rows:
            return False
    return shifted and rows.isdisjoint(graph.outputs | graph.onward)


def _mark(graph: Graph, group: set[int], values: Iterable[int], pending: list[int]) -> None:
    """Add values to a group, and their readers to a heap of positions in the program."""
    for value in values:
        group.add(value)
        for node in graph.readers[value]:
            heapq.heappush(pending, node.index)
