"""Orders in which analyses visit a program, repeated until loop carries no longer change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxamp.plan.graph.graph import Graph, Link, Node


def forward(graph: Graph, bits: Sequence[int]) -> Iterator[Node]:
    """Yield all nodes in program order, repeatedly while the flags of a carry change.

    Args:
      graph: the program.
      bits: the flags of each value, which the caller updates as it goes.
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
    """Yield all nodes in reverse order, repeatedly while the flags of a carry change."""
    before = None
    while before != (before := [bits[carry.inner] for carry in graph.carries]):
        yield from reversed(graph.nodes)
