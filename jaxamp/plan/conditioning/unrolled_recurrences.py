"""Recurrences that are written out: what a turn hands to the next is no loop's carry.

`for x in xs: h = z * h + (1 - z) * jnp.tanh(x @ w + h @ u)`: sums, each linear in the one before,
that are multiplied by the same array turn after turn. A few turns round as a few layers do; of
many, what is added may be less than a rounding of the sum. A residual stream is no recurrence:
between two of its sums is a matrix that nothing else is multiplied by.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, movements

LinearPath = list[tuple[Node, int]]
_Sums = tuple[int, ...]  # the last ones first
_Key = tuple[Any, ...]

_ITERATIONS = 8  # fewer are like layers
_MOST = 16  # sums that are remembered of each value
_ADDS = ("add", "sub", "add_any")
_SCALES = ("mul", "div")
_LINEAR = (*_SCALES, *_ADDS, "neg", "select_n", "copy")
_THROUGH = (Role.ELEMENTWISE, Role.REDUCE, Role.MERGE)


def is_linear(node: Node, value: int) -> bool:
    """Whether what a node makes is linear in a value that it reads, the others fixed."""
    if node.role is Role.MOVE:
        return True
    if node.name == "div":
        return value == node.ins[0]
    return node.name in _LINEAR or node.link is Link.JOIN


def _is_product(node: Node) -> bool:
    """Whether a node multiplies arrays; what a user has called Compute may read but one."""
    return node.role is Role.CONTRACT and len(node.ins) > 1


def find_unrolled_recurrences(graph: Graph, provenance: Provenance) -> LinearPath:
    """Nodes by which a carried sum is made of the one before, and what of it they read."""
    products = _Products(graph, provenance)
    if not products.is_any_repeated():
        return []
    iterations = _Iterations(graph, provenance, products)
    for node in graph.nodes:
        iterations.enter(node)
    return iterations.linear_path()


class _Products:
    """What is multiplied by the same array, in the same way.

    Attributes:
      counts: how often an array is multiplied in one way.
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
        """Each operand of a product, and by what and how it is multiplied."""
        numbers = node.eqn.params.get("dimension_numbers")
        for data, by in ((0, 1), (1, 0)):
            origin = self._origin.get(node.ins[by], node.ins[by])
            yield node.ins[data], (origin, data, numbers)

    def is_any_repeated(self) -> bool:
        """Whether any array is multiplied in many turns."""
        return any(count >= _ITERATIONS for count in self.readers.values())

    def _follow(self, node: Node) -> None:
        """Notes what is moved from a boundary value; the same part, cut out again, is the same."""
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
        """Whether a boundary value, or a part of one, is multiplied here and nowhere else."""
        pairs = zip(self.of(node), reversed(node.ins[:2]), strict=True)
        return any(
            by in self._boundary and provenance.dense[data] and self.readers[key] == 1
            for (data, key), by in pairs
        )


class _Iterations:
    """A sweep forward.

    Attributes:
      line: the sums that each value is linear in.
      reach: the sums that it is made of without a product.
      read: per product, how many turns come before each sum that it has read, and in which node.
      before: the sums of the turn before, of each sum.
    """

    def __init__(self, graph: Graph, provenance: Provenance, products: _Products) -> None:
        self.graph, self.provenance, self.products = graph, provenance, products
        self.line: list[_Sums] = [()] * len(graph.avals)
        self.reach: list[_Sums] = [()] * len(graph.avals)
        self.maker: dict[int, int] = {}
        self.read: dict[_Key, dict[int, tuple[int, int]]] = {}
        self.before: dict[int, set[int]] = {}

    def enter(self, node: Node) -> None:
        """Finds what the results of a node are made of, and what a product reads again."""
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
        """Whether one sum was read before another was made, and no layer is in between."""
        layers, made = self.products.layers, self.maker[then]
        return read[1] < made and bisect(layers, made) == bisect(layers, self.maker[first])

    def linear_path(self) -> LinearPath:
        """What leads from turn to turn, in recurrences of many turns."""
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
        """The sums of recurrences of many turns; what only a turn's own products read is none."""
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
