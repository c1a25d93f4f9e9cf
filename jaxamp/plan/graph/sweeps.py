"""The order in which an analysis goes through a program, and how often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxamp.plan.graph.graph import Graph, Link, Node


def forward(graph: Graph, bits: Sequence[int]) -> Iterator[Node]:
    """All nodes in program order; again while what a turn of a loop hands to the next changes.

    Args:
      graph: the program.
      bits: the flags of each value, to which the caller adds as it goes.
    """
    if not graph.carries:
        return iter(graph.nodes)
    return _forward(graph, bits)


def _forward(graph: Graph, bits: Sequence[int]) -> Iterator[Node]:
    changes = True
    while changes:
        changes = False
        for node in graph.nodes:
            if node.link is not Link.BACK:
                yield node
                continue
            (carried,) = node.outs
            before = bits[carried]
            yield node
            changes |= bits[carried] != before


def backward(graph: Graph, bits: Sequence[int]) -> Iterator[Node]:
    """All nodes from the last to the first; again while what a turn reads of a carry changes."""
    before = None
    while before != (before := [bits[carry.inner] for carry in graph.carries]):
        yield from reversed(graph.nodes)
