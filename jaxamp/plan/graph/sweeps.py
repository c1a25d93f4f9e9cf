"""Sweeps over a program: flags of values, and the orders in which analyses visit the nodes.

Several boolean properties of a value are the bits of one byte. A sweep is repeated until the flags
of loop carries no longer change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from functools import cache

from jaxamp.plan.graph.graph import Graph, Link, Node


def union(bits: Sequence[int], values: Iterable[int]) -> int:
    """Return the flags that any of some values has.

    >>> union(bytes([1, 4, 2]), (0, 2))
    3
    """
    found = 0
    for value in values:
        found |= bits[value]
    return found


def mark(bits: MutableSequence[int], values: Iterable[int], flags: int) -> None:
    """Add flags to those of some values."""
    for value in values:
        bits[value] |= flags


def column(bits: bytearray, flag: int) -> bytes:
    """Return one byte per value: 1 if it has a flag and else 0.

    >>> list(column(bytearray([1, 4, 6]), 4))
    [0, 1, 1]
    """
    return bytes(bits).translate(_table(flag))


@cache
def _table(flag: int) -> bytes:
    return bytes(byte & flag != 0 for byte in range(256))


def forward(graph: Graph, bits: Sequence[int]) -> Iterator[Node]:
    """Yield all nodes in program order, repeatedly while the caller changes flags of a carry."""
    return _forward(graph, bits) if graph.carries else iter(graph.nodes)


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
    return _backward(graph, bits) if graph.carries else reversed(graph.nodes)


def _backward(graph: Graph, bits: Sequence[int]) -> Iterator[Node]:
    before = None
    while before != (before := [bits[carry.inner] for carry in graph.carries]):
        yield from reversed(graph.nodes)
