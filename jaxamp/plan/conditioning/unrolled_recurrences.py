"""Find recurrences that are unrolled in Python, whose state is no carry of a loop.

`for x in xs: h = z * h + (1 - z) * jnp.tanh(x @ w + h @ u)`: sums, each linear in the one before,
to which products by the same arrays add. A few iterations round like a few layers; after many, the
increment may be smaller than a rounding of the sum. A residual stream is no recurrence: between two
of its sums is a matrix that multiplies nothing else.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.consumers import ADDS, SCALES
from jaxamp.plan.graph.graph import Graph, Link, Node, Role

LinearPath = list[tuple[Node, int]]

_ITERATIONS = 8  # fewer round as a network of few layers does
_LINEAR = (*SCALES, *ADDS, "neg", "select_n", "copy")


def is_linear(node: Node, value: int) -> bool:
    """Return whether a node's result is linear in one operand with the others fixed."""
    if node.role is Role.MOVE:
        return True
    if node.name == "div":
        return value == node.ins[0]
    return node.name in _LINEAR or node.link is Link.JOIN


def find_unrolled_recurrences(graph: Graph, provenance: Provenance) -> LinearPath:
    """Return the nodes that make a recurrent sum from the previous one, each with that operand."""
    repeated, layers = _find_products(graph, provenance)
    if not repeated:
        return []
    sums = _find_sums(graph, provenance, repeated, layers)
    found, path = [], set[int]()
    for node in reversed(graph.nodes):
        if node.name in ADDS and sums[node.outs[0]].iteration >= _ITERATIONS:
            path.update(node.outs)
        if path.isdisjoint(node.outs):
            continue
        for value in dict.fromkeys(node.ins):
            if is_linear(node, value) and sums[value].iteration:
                found.append((node, value))
                path.add(value)
    return found


def _find_products(graph: Graph, provenance: Provenance) -> tuple[set[Node], set[Node]]:
    """Return contractions by an array that many others multiply by alike, and layers.

    A layer multiplies an activation by an array of its own. Equal slices of one array are the same.
    """
    origins: dict[int, int] = {}
    slices: dict[tuple[Any, ...], int] = {}
    pairs = []
    for node in graph.nodes:
        if node.role is Role.CONTRACT and len(node.ins) > 1:  # user-registered ones may have one
            numbers = node.eqn.params.get("dimension_numbers")
            for data, by in (node.ins[:2], node.ins[1::-1]):
                how = origins.get(by, by), by == node.ins[1], numbers
                pairs.append((node, data, by, how))
        for source, out in node.moves if node.role is Role.MOVE else ():
            origin = origins.get(source, source)
            if graph.sizes[source] == graph.sizes[out]:
                origins[out] = origin
            elif node.name == "slice":
                params = node.eqn.params
                place = origin, params["start_indices"], params["limit_indices"], params["strides"]
                origins[out] = slices.setdefault(place, out)
    readers = Counter(how for *_, how in pairs)
    repeated = {node for node, *_, how in pairs if readers[how] >= _ITERATIONS}
    layers = {
        node
        for node, data, by, how in pairs
        if readers[how] == 1 and graph.origin(by) in graph.sources and provenance.dense[data]
    }
    return repeated, layers


class _Sum(NamedTuple):
    """Latest sum that a value is linear in, the products before it, and its iteration."""

    iteration: int = 0
    depth: int = 0


def _find_sums(
    graph: Graph, provenance: Provenance, repeated: set[Node], layers: set[Node]
) -> list[_Sum]:
    """Return, per value, the sum that it is linear in, by a sweep that counts iterations."""
    depths = [0] * len(graph.avals)  # repeated products on the longest path to each value
    last = [-1] * len(graph.avals)  # the depth at the last layer on a path to it
    sums = [_Sum()] * len(graph.avals)
    for node in graph.nodes:
        depth = max((depths[v] for v in node.ins), default=0)
        layer = max((last[v] for v in node.ins), default=-1)
        linear = [sums[v] for v in node.ins if is_linear(node, v)]
        if node.name in ADDS and sum(provenance.dense[v] for v in node.ins) > 1:
            linear = [_next(before, depth, layer) for before in linear]
        for out in node.outs:
            depths[out] = depth + (node in repeated)
            last[out] = depth if node in layers else layer
            sums[out] = max(linear, default=_Sum())
    return sums


def _next(before: _Sum, depth: int, layer: int) -> _Sum:
    """Return the sum that continues another: a new iteration if a product is in between."""
    if before.iteration and before.depth == depth:
        return before
    return _Sum(before.iteration + 1 if layer < before.depth else 1, depth)
