"""Products that are larger than what they are made of, and read only relative to their maximum.

The logits of a large vocabulary: a loss shifts each row by its maximum before it adds anything up.
Such a product reaches no other, so arithmetic gains nothing by a narrow format; memory does. The
product is the largest array of the program, written once and read in each direction, and one
rounding of it is no more than what the scores of attention bear.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.graph.graph import Graph, Node, Role, is_smaller


def outweighs_operands(graph: Graph, node: Node) -> bool:
    """Whether a product is known to have more elements than its operands together."""
    return is_smaller(sum(graph.sizes[v] for v in node.ins), graph.sizes[node.outs[0]])


def is_shift_invariant(graph: Graph, value: int) -> bool:
    """Whether a value is read for its extremes, and for how far it is from them.

    Before, it may be moved, scaled, masked or bent, number by number.
    """
    rows, extremes = set[int](), set[int]()  # the value in its later forms, and what bounds it
    pending: list[int] = []
    _mark(graph, rows, (value,), pending)
    shifted, last = False, -1
    while pending:
        index = heapq.heappop(pending)
        if index == last:
            continue
        last, node = index, graph.nodes[index]
        reads_rows = not rows.isdisjoint(node.ins)
        one_by_one = node.role in _ONE_BY_ONE and node.trait is not Trait.SENSITIVE
        if reads_rows and node.name == "sub" and not extremes.isdisjoint(node.ins):
            shifted = True
        elif (reads_rows and node.trait is Trait.EXTREMUM) or (one_by_one and not reads_rows):
            _mark(graph, extremes, node.outs, pending)
        elif reads_rows and one_by_one:
            _mark(graph, rows, node.outs, pending)
        elif reads_rows:
            return False
    return shifted and rows.isdisjoint(graph.outputs | graph.onward)


def _mark(graph: Graph, group: set[int], values: Iterable[int], pending: list[int]) -> None:
    """Puts values into a group, and what reads them into a heap of places in the program."""
    for value in values:
        group.add(value)
        for node in graph.readers[value]:
            heapq.heappush(pending, node.index)


_ONE_BY_ONE = (Role.MOVE, Role.ELEMENTWISE, Role.MERGE)
