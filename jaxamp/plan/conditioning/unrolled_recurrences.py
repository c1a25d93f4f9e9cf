"""Find recurrences that are unrolled in Python, whose state is no carry of a loop.

`for x in xs: h = z * h + (1 - z) * jnp.tanh(x @ w + h @ u)`: sums, each linear in the one before,
to which products by the same arrays add. A few iterations round like a few layers; after many, the
increment may be smaller than a rounding of the sum. A residual stream is no recurrence: between two
of its sums is a matrix that multiplies nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, movements

LinearPath = list[tuple[Node, int]]
_Key = tuple[Any, ...]

_ITERATIONS = 8  # fewer round as a network of few layers does
_ADDS = ("add", "sub", "add_any")
_SCALES = ("mul", "div")
_LINEAR = (*_SCALES, *_ADDS, "neg", "select_n", "copy")


def is_linear(node: Node, value: int) -> bool:
    """Return whether a node's result is linear in one operand with the others fixed."""
    if node.role is Role.MOVE:
        return True
    if node.name == "div":
        return value == node.ins[0]
    return node.name in _LINEAR or node.link is Link.JOIN


def _is_product(node: Node) -> bool:
    """Return whether a node multiplies two arrays; user-registered Compute may have one operand."""
    return node.role is Role.CONTRACT and len(node.ins) > 1


def find_unrolled_recurrences(graph: Graph, provenance: Provenance) -> LinearPath:
    """Return the nodes that make a recurrent sum from the previous one, each with that operand."""
    products = _Products(graph, provenance)
    if not products.repeated:
        return []
    states = _States(graph, provenance, products)
    for node in graph.nodes:
        states.enter(node)
    return states.linear_path()


class _Products:
    """Contractions grouped by the array that they multiply by, and how.

    Attributes:
      repeated: indices of nodes that multiply by an array as many others do.
      layers: indices of nodes that multiply an activation by an array of their own.
    """

    def __init__(self, graph: Graph, provenance: Provenance) -> None:
        self._graph = graph
        self._origin: dict[int, int] = {}
        self._boundary: set[int] = set(graph.sources)
        self._parts: dict[_Key, int] = {}
        for node in graph.nodes:
            if node.role is Role.MOVE:
                self._follow(node)
        pairs = [pair for node in graph.nodes if _is_product(node) for pair in self._pairs(node)]
        readers = Counter(key for _, _, _, key in pairs)
        self.repeated = {node for node, _, _, key in pairs if readers[key] >= _ITERATIONS}
        self.layers = {
            node
            for node, data, by, key in pairs
            if readers[key] == 1 and by in self._boundary and provenance.dense[data]
        }

    def _pairs(self, node: Node) -> Iterable[tuple[int, int, int, _Key]]:
        """Return each operand of a contraction, and by which array and how it is multiplied."""
        numbers = node.eqn.params.get("dimension_numbers")
        for data, by in (node.ins[:2], node.ins[1::-1]):
            yield node.index, data, by, (self._origin.get(by, by), by == node.ins[1], numbers)

    def _follow(self, node: Node) -> None:
        """Record values moved from a boundary value; equal slices of one array are the same."""
        for source, out in movements(node):
            if source in self._boundary:
                self._boundary.add(out)
            origin = self._origin.get(source, source)
            if self._graph.sizes[source] == self._graph.sizes[out]:
                self._origin[out] = origin
            elif node.name == "slice":
                params = node.eqn.params
                place = origin, params["start_indices"], params["limit_indices"], params["strides"]
                self._origin[out] = self._parts.setdefault(place, out)


class _Sum(NamedTuple):
    """Latest sum that a value is linear in, the products before it, and its iteration."""

    iteration: int = 0
    depth: int = 0


class _States:
    """Forward sweep that counts the iterations of recurrent sums.

    Attributes:
      depth: per value, the repeated products on the longest path to it.
      layer: per value, the depth at the last layer on a path to it.
      sum: per value, the sum that it is linear in.
    """

    def __init__(self, graph: Graph, provenance: Provenance, products: _Products) -> None:
        self.graph, self.dense, self.products = graph, provenance.dense, products
        self.depth = [0] * len(graph.avals)
        self.layer = [-1] * len(graph.avals)
        self.sum = [_Sum()] * len(graph.avals)

    def enter(self, node: Node) -> None:
        """Record what a node's results depend on."""
        depth = max((self.depth[v] for v in node.ins), default=0)
        layer = max((self.layer[v] for v in node.ins), default=-1)
        if node.index in self.products.layers:
            layer = depth
        found = self._sum(node, depth)
        for out in node.outs:
            self.depth[out] = depth + (node.index in self.products.repeated)
            self.layer[out], self.sum[out] = layer, found

    def _sum(self, node: Node, depth: int) -> _Sum:
        linear = [self.sum[v] for v in node.ins if is_linear(node, v)]
        if node.name in _ADDS and sum(self.dense[v] for v in node.ins) > 1:
            layer = max(self.layer[v] for v in node.ins)
            linear = [_next(before, depth, layer) for before in linear]
        return max(linear, default=_Sum())

    def linear_path(self) -> LinearPath:
        """Return the path from iteration to iteration, in recurrences of many iterations."""
        found, path = [], set[int]()
        for node in reversed(self.graph.nodes):
            if node.name in _ADDS and self.sum[node.outs[0]].iteration >= _ITERATIONS:
                path.update(node.outs)
            if path.isdisjoint(node.outs):
                continue
            for value in dict.fromkeys(node.ins):
                if is_linear(node, value) and self.sum[value].iteration:
                    found.append((node, value))
                    path.add(value)
        return found


def _next(before: _Sum, depth: int, layer: int) -> _Sum:
    """Return the sum that continues another: a new iteration if a product is in between."""
    if before.iteration and before.depth == depth:
        return before
    return _Sum(before.iteration + 1 if layer < before.depth else 1, depth)
