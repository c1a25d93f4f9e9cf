"""Find recurrences that are unrolled in Python, whose state is no carry of a loop.

`for x in xs: h = z * h + (1 - z) * jnp.tanh(x @ w + h @ u)`: sums, each linear in the one before,
multiplied by the same array in every iteration. A few iterations round like a few layers; after
many, the increment may be smaller than a rounding of the sum. A residual stream is no recurrence:
between two of its sums is a matrix that multiplies nothing else.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, movements

LinearPath = list[tuple[Node, int]]
_Sums = tuple[int, ...]  # indices of sums, latest first
_Key = tuple[Any, ...]

_ITERATIONS = 8  # fewer round as a network of few layers does
_MOST = 16  # sums kept per value: a bound on time
_ADDS = ("add", "sub", "add_any")
_SCALES = ("mul", "div")
_LINEAR = (*_SCALES, *_ADDS, "neg", "select_n", "copy")
_THROUGH = (Role.ELEMENTWISE, Role.REDUCE, Role.MERGE)


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
    if not products.is_any_repeated():
        return []
    iterations = _Iterations(graph, provenance, products)
    for node in graph.nodes:
        iterations.enter(node)
    return iterations.linear_path()


class _Products:
    """Contractions grouped by the array that they multiply by, and how.

    Attributes:
      counts: number of contractions with one array in one way.
      layers: indices of the nodes that multiply an activation by an array of their own.
    """

    def __init__(self, graph: Graph, provenance: Provenance) -> None:
        self.graph = graph
        self._origin: dict[int, int] = {}
        self._boundary: set[int] = set(graph.sources)
        self._parts: dict[_Key, int] = {}
        for node in graph.nodes:
            if node.role is Role.MOVE:
                self._follow(node)
        contractions = [node for node in graph.nodes if _is_product(node)]
        self.readers = Counter(key for node in contractions for _, key in self.of(node))
        self.layers = [node.index for node in contractions if self._is_layer(provenance, node)]

    def of(self, node: Node) -> Iterable[tuple[int, _Key]]:
        """Return each operand of a contraction, and by which array and how it is multiplied."""
        numbers = node.eqn.params.get("dimension_numbers")
        for data, by in ((0, 1), (1, 0)):
            origin = self._origin.get(node.ins[by], node.ins[by])
            yield node.ins[data], (origin, data, numbers)

    def is_any_repeated(self) -> bool:
        """Return whether any array multiplies in many iterations."""
        return any(count >= _ITERATIONS for count in self.readers.values())

    def _follow(self, node: Node) -> None:
        """Record values moved from a boundary value; equal slices of one array are the same."""
        for source, out in movements(node):
            if source in self._boundary:
                self._boundary.add(out)
            origin = self._origin.get(source, source)
            if self.graph.sizes[source] == self.graph.sizes[out]:
                self._origin[out] = origin
            elif node.name == "slice":
                params = node.eqn.params
                place = origin, params["start_indices"], params["limit_indices"], params["strides"]
                self._origin[out] = self._parts.setdefault(place, out)

    def _is_layer(self, provenance: Provenance, node: Node) -> bool:
        """Return whether a boundary value, or a slice of it, multiplies an activation only here."""
        pairs = zip(self.of(node), reversed(node.ins[:2]), strict=True)
        return any(
            by in self._boundary and provenance.dense[data] and self.readers[key] == 1
            for (data, key), by in pairs
        )


class _Iterations:
    """Forward sweep that counts the iterations of recurrent sums.

    Attributes:
      line: per value, the sums that it is linear in.
      reach: per value, the sums that it depends on without a product between.
      maker: index of the node that computes each value.
      read: per product, the iteration of each sum that it has read, and the reading node.
      before: per sum, the sums of the previous iteration.
    """

    def __init__(self, graph: Graph, provenance: Provenance, products: _Products) -> None:
        self.graph, self.provenance, self.products = graph, provenance, products
        self.line: list[_Sums] = [()] * len(graph.avals)
        self.reach: list[_Sums] = [()] * len(graph.avals)
        self.maker: dict[int, int] = {}
        self.read: dict[_Key, dict[int, tuple[int, int]]] = {}
        self.before: dict[int, set[int]] = {}

    def enter(self, node: Node) -> None:
        """Record the sums that a node's results depend on, and what a product reads again."""
        if _is_product(node):
            for data, key in self.products.of(node):
                if self.products.readers[key] >= _ITERATIONS:
                    self._read(node, self.reach[data], self.read.setdefault(key, {}))
        elif node.role is Role.MOVE:
            for source, out in movements(node):
                self.line[out], self.reach[out] = self.line[source], self.reach[source]
        elif node.role in _THROUGH or node.link is Link.JOIN:
            new = node.outs if self._is_sum(node) else ()
            linear = [self.line[v] for v in node.ins if is_linear(node, v)]
            line = _latest([new, *linear])
            reach = _latest([new, *(self.reach[v] for v in node.ins)])
            for out in node.outs:
                self.line[out], self.reach[out], self.maker[out] = line, reach, node.index

    def _is_sum(self, node: Node) -> bool:
        dense = {v for v in node.ins if self.provenance.dense[v]}
        return node.name in _ADDS and len(dense) > 1

    def _read(self, node: Node, reach: _Sums, read: dict[int, tuple[int, int]]) -> None:
        for root in reach:
            if root in read:
                continue
            before = [
                r
                for r in self.line[root]
                if r in read and self._is_next_iteration(r, read[r], root)
            ]
            iterations = max((read[r][0] for r in before), default=0)
            self.before.setdefault(root, set()).update(
                r for r in before if read[r][0] == iterations
            )
            read[root] = iterations + 1, node.index

    def _is_next_iteration(self, first: int, read: tuple[int, int], then: int) -> bool:
        """Return whether a sum was read before the next was made, with no layer in between."""
        layers, made = self.products.layers, self.maker[then]
        return read[1] < made and bisect(layers, made) == bisect(layers, self.maker[first])

    def linear_path(self) -> LinearPath:
        """Return the path from iteration to iteration, in recurrences of many iterations."""
        carried = self._carried()
        if not carried:
            return []
        found, path = [], set(carried)
        for node in reversed(self.graph.nodes):
            if path.isdisjoint(node.outs):
                continue
            for value in dict.fromkeys(node.ins):
                if is_linear(node, value) and not carried.isdisjoint(self.line[value]):
                    found.append((node, value))
                    path.add(value)
        return found

    def _carried(self) -> set[int]:
        """Return sums of recurrences of many iterations that later iterations depend on."""
        carried, pending = set[int](), list[int]()
        for read in self.read.values():
            most = max((iterations for iterations, _ in read.values()), default=0)
            carried.update(
                r for r, (iterations, _) in read.items() if iterations == most >= _ITERATIONS
            )
            pending += [r for r, (iterations, _) in read.items() if iterations >= _ITERATIONS]
        for root in pending:
            new = self.before[root] - carried
            carried |= new
            pending += new
        return carried


def _latest(parts: Sequence[_Sums]) -> _Sums:
    parts = [part for part in parts if part]
    if len(parts) < 2:
        return parts[0] if parts else ()
    return tuple(sorted(set().union(*parts), reverse=True)[:_MOST])
