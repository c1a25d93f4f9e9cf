"""Find how much the products that read a value move: beside it, a small value is worth nothing.

A network that adds a little to a state of low dimension (coordinates, angles, prices) is wide where
the state is narrow: 64 hidden units for 3 coordinates. To round such a state, or its cotangent,
costs digits that later differences and sums over examples need, and saves next to nothing. What a
product reads itself is rounded there anyway, but what only makes an operand, such as a partial
derivative that a loop saves for the cotangents of its backward pass, is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, is_smaller
from jaxamp.plan.graph.sweeps import backward, mark

_SHARE = 8  # below an eighth of what a product moves, half of a value's bytes are under 1/16 of it


def find_product_sizes(graph: Graph, provenance: Provenance) -> list[Any]:
    """Return, per value, the size of the smallest product that reads it or what is made of it.

    The size of a product is that of the largest activation among its results and its other
    operands, in elements. It is 0 for values that no product reads, and for its operands that
    nothing else reads: without a path to a result of the program that leads through no product.
    """
    least: list[Any] = [0] * len(graph.avals)
    escapes, read = bytearray(len(graph.avals)), bytearray(len(graph.avals))
    mark(escapes, graph.outputs, 1)
    for node in backward(graph, escapes):
        if node.role is Role.CONTRACT:
            for value in node.ins:
                _lower(least, value, _size(graph, provenance, node, value))
                read[value] = 1
            continue
        moved = node.moves if node.role is Role.MOVE else itertools.product(node.ins, node.outs)
        for source, out in moved:
            if least[out]:
                size = least[out]
                if node.link is not None:
                    size = _before(graph, node, source, out, size)
                _lower(least, source, size)
            escapes[source] |= escapes[out]
            read[source] |= read[out] and node.role in (Role.MOVE, Role.LINK)
    return [0 if read[v] and not escapes[v] else size for v, size in enumerate(least)]


def _before(graph: Graph, node: Node, source: int, out: int, size: Any) -> Any:
    """Return the size of a product as many times as a loop runs it for what a node reads."""
    if node.link is Link.SLICE:
        return size * graph.avals[source].shape[0]
    if node.link is Link.STACK and is_smaller(0, graph.sizes[out]):
        return size // graph.avals[out].shape[0]
    return size


def is_small_beside_products(graph: Graph, least: Sequence[Any], value: int) -> bool:
    """Return whether a value is small beside every product that reads it."""
    return is_smaller(graph.sizes[value] * _SHARE, least[value] + 1)


def _size(graph: Graph, provenance: Provenance, node: Node, value: int) -> Any:
    others = [v for v in node.ins if v != value and provenance.dense[v]]
    size = 0
    for other in (*node.outs, *others):
        if is_smaller(size, graph.sizes[other]):
            size = graph.sizes[other]
    return size


def _lower(least: list[Any], value: int, size: Any) -> None:
    if size and (not least[value] or is_smaller(size, least[value])):
        least[value] = size
