"""Find products that lose their meaning where operands are rounded: cancelled ones, and phases.

Where points lie far from zero and near each other, `|a|² + |b|² - 2 abᵀ` is no larger than a
rounding of `abᵀ`. So is a covariance less the product of means, and any sum of a product and of
sums of squares of its operands, which are as large. The phase of a wave is needed to a part of a
turn, however many turns there are. Products of a backward pass that multiply the cotangent of such
a product are no better conditioned.

How large a phase is no program says. If a layer makes it, as in a network of sines, it is as large
as other activations: then its product stays float32 only where all such products are a small part
of the program's arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jaxamp.core.guards import Guard
from jaxamp.core.semantics import Linear
from jaxamp.jaxprs.contracted import size, terms
from jaxamp.plan.dataflow.constraints import Constraint, free_axes
from jaxamp.plan.dataflow.layer_roles import is_backward
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, is_smaller, movements
from jaxamp.plan.graph.sweeps import backward

CANCELLED = Constraint("sums of squares of its operands nearly cancel it", Guard.SENSITIVE)
PHASE = Constraint("the phase of a periodic function", Guard.SENSITIVE)
OUTER = Constraint("an outer product is elementwise", Guard.NO_GAIN)

Table = dict[int, frozenset[int]]
_SMALL = 8  # what is a smaller part of the arithmetic than one in so many is not missed
_NONE: frozenset[int] = frozenset()
_SUMS = ("add", "sub")
_SCALES = ("mul", "div")
_KEPT = (*_SUMS, "neg", "abs", "max", "min")  # results have the squares, or products, of operands
_POWERS = ("square", "integer_pow", "pow")
_REDUCTIONS = ("reduce_sum", "psum", "psum_invariant")


def find_precise_products(graph: Graph) -> None:
    """Enter into a graph its products that are not to be rounded, and what these read."""
    products = [n for n in graph.nodes if n.role is Role.CONTRACT and len(n.ins) > 1]
    squares = _Squares(graph)
    found = dict.fromkeys(squares.cancelled(), CANCELLED)
    found = dict.fromkeys(_phases(graph, products), PHASE) | found
    for node, why in list(found.items()):
        if not is_backward(node.scope):
            found.update(dict.fromkeys(squares.transposed(node, products), why))
    outer = (n for n in products if _terms(graph, n) == 1)
    graph.precise = dict.fromkeys(outer, OUTER) | found
    for value in (v for node in found for v in node.ins):
        graph.unrounded.add(value)
        while value in graph.moved_from:
            value = graph.moved_from[value]
            graph.unrounded.add(value)


def is_square(node: Node) -> bool:
    """Return whether a node multiplies a value by itself."""
    if node.name == "mul":
        return node.ins[0] == node.ins[1]
    return node.name in ("square", "integer_pow") and node.eqn.params.get("y", 2) == 2


def _phases(graph: Graph, products: Sequence[Node]) -> list[Node]:
    """Return the products that are phases, shifted, scaled and added up too."""
    bits, made = bytearray(len(graph.avals)), bytearray(len(graph.avals))
    if not any(_is_periodic(graph, node) for node in graph.nodes):
        return []
    for node in backward(graph, bits):
        if _is_periodic(graph, node):
            bits[node.ins[0]] = 1
        elif any(bits[v] for v in node.outs) and _is_linear(node):
            for value in node.ins[: 1 if node.role is Role.MOVE else None]:
                bits[value] = 1
    for value in graph.activations:
        made[value] = 1
    for node in graph.nodes:
        if node.role is Role.CONTRACT or any(made[v] for v in node.ins):
            for out in node.outs:
                made[out] = 1
    phases = [n for n in products if bits[n.outs[0]] and not is_backward(n.scope)]
    of_layers = {n for n in phases if any(made[v] for v in n.ins)}
    part, whole = (sum(_work(graph, n) for n in nodes) for nodes in (of_layers, products))
    return phases if part * _SMALL <= whole else [n for n in phases if n not in of_layers]


def _is_periodic(graph: Graph, node: Node) -> bool:
    is_wave = node.name == "exp" and graph.kinds[node.outs[0]] == "c"
    return is_wave or (node.semantics.periodic and graph.kinds[node.outs[0]] == "f")


def _is_linear(node: Node) -> bool:
    if node.role in (Role.ELEMENTWISE, Role.REDUCE):
        return node.semantics.linear is not Linear.NOT
    return node.name == "complex" or node.role not in (Role.CONTRACT, Role.FIXED)


def _terms(graph: Graph, node: Node) -> int:
    avals = [graph.avals[v] for v in node.ins]
    return terms(node.name, node.eqn.params, avals) or 0


def _work(graph: Graph, node: Node) -> int:
    return size(graph.avals[node.outs[0]]) * _terms(graph, node)


class _Squares:
    """Per value the array that it is made of, and those of which it has squares, or sums of such.

    An array that is moved, scaled or shifted by known or smaller ones is the same array, and so is
    its sum over an axis, or its slice in a loop.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.origins = list(range(len(graph.avals)))
        self.is_sum = bytearray(len(graph.avals))
        self.squares: Table = {}
        self.sums: Table = {}
        self.joined: Table = {}
        self.makers: dict[int, Node] = {}
        for node in graph.nodes:
            self.makers.update(dict.fromkeys(node.outs, node))
            if node.role is Role.MOVE:
                for source, out in movements(node):
                    self._follow(source, out, is_part=is_smaller(*self._sizes(out, source)))
            elif node.role is Role.LINK:
                if node.link is not Link.BACK:
                    self._follow(node.ins[0], node.outs[0])
            elif node.name in _REDUCTIONS:
                for source, out in movements(node):
                    self._follow(source, out, is_part=True)
                    self.is_sum[out] = 1
            else:
                self._make(node)

    def cancelled(self) -> Iterator[Node]:
        """Yield the products to which sums of squares of their operands are added."""
        if not self.sums:
            return
        for node in self.graph.nodes:
            if node.name in _SUMS and len(node.ins) == 2:
                for one, other in (node.ins, node.ins[::-1]):
                    roots = self.sums.get(other, _NONE)
                    if roots and (shared := self._shared(one, roots)):
                        yield from shared
                        yield from self._shared(other, roots)
            elif node.role is Role.CONTRACT and all(map(self._has_own_squares, node.ins)):
                yield node

    def transposed(self, node: Node, products: Sequence[Node]) -> Iterator[Node]:
        """Yield the products of a backward pass that multiply a product's cotangent."""
        sizes, roots = self.graph.sizes, self._roots(node)
        for other in products:
            if is_backward(other.scope):
                pairs = (other.ins[:2], other.ins[1::-1])
                of_it = [sizes[g] for v, g in pairs if self.origins[v] in roots]
                if sizes[node.outs[0]] in of_it:
                    yield other

    def _make(self, node: Node) -> None:
        if not node.outs:
            return
        out, ins = node.outs[0], node.ins
        roots = {self.origins[v] for v in ins}
        if node.role is Role.MERGE:
            self.joined[out] = frozenset(roots)
            self._unite(self.sums, ins, out)
        elif node.role is Role.CONTRACT:
            self._unite(self.squares, ins[:2], out, self.sums)
            if len(ins) > 1 and self.origins[ins[0]] == self.origins[ins[1]]:
                is_inner = free_axes(self.graph, node) == 0 or self.is_sum[ins[0]]
                self._add(self.sums if is_inner else self.squares, out, roots)
        elif node.name in _POWERS:
            self._unite(self.sums, ins[:1], out)
            if is_square(node) or self.graph.constants.get(ins[-1]) == 2:
                self._add(self.squares, out, {self.origins[ins[0]]})
        elif node.name == "mul" and len(roots) == 1:
            is_summed = any(self.is_sum[v] for v in ins)
            self._add(self.sums if is_summed else self.squares, out, roots)
        elif node.name in (*_KEPT, *_SCALES, "sqrt"):
            main = self._main(node)
            if main is not None:
                self.origins[out], self.is_sum[out] = self.origins[main], self.is_sum[main]
            read = ins[:1] if node.name == "div" else ins
            self._unite(self.sums, read, out)
            self._unite(self.squares, read, out)

    def _follow(self, source: int, out: int, is_part: bool = False) -> None:
        self.origins[out], self.is_sum[out] = self.origins[source], self.is_sum[source]
        self._unite(self.squares, (source,), out, self.sums if is_part else self.squares)
        self._unite(self.sums, (source,), out)

    def _main(self, node: Node) -> int | None:
        """Return the operand that known or smaller numbers scale or shift, if there is one."""
        read = [v for v in node.ins if v not in self.graph.constants]
        for value in read:
            others = (v for v in read if v != value)
            if all(is_smaller(*self._sizes(v, value)) for v in others):
                return value if node.name != "div" or value == node.ins[0] else None
        return None

    def _sizes(self, *values: int) -> list[int]:
        """Return the sizes of values as they were before they were repeated."""
        sizes = self.graph.sizes
        moved = ((v, self.graph.origin(v)) for v in values)
        return [sizes[o] if is_smaller(sizes[o], sizes[v]) else sizes[v] for v, o in moved]

    def _shared(self, value: int, roots: frozenset[int]) -> list[Node]:
        """Return the products in a sum that multiply one of some arrays."""
        found, seen, pending = list[Node](), {value}, [value]
        for value in pending:
            node = self.makers.get(value)
            if node is None:
                continue
            if node.role is Role.CONTRACT:
                found += [node] if not roots.isdisjoint(self._roots(node)) else []
                continue
            new = [v for v in self._terms(node, value) if v not in seen]
            seen.update(new)
            pending += new
        return found

    def _terms(self, node: Node, value: int) -> Iterable[int]:
        """Return what a value is a sum or a multiple of."""
        if node.role is Role.MOVE:
            return [source for source, out in movements(node) if out == value]
        if node.name in (*_KEPT, *_POWERS) or (
            node.role is Role.LINK and node.link is not Link.BACK
        ):
            return node.ins
        main = self._main(node) if node.name in _SCALES else None
        return () if main is None else (main,)

    def _roots(self, node: Node) -> frozenset[int]:
        """Return the arrays that a product multiplies, or whose squares it does."""
        read = node.ins[:2]
        own = frozenset(self.origins[v] for v in read)
        return own.union(*(self.squares.get(v, _NONE) for v in read))

    def _has_own_squares(self, value: int) -> bool:
        """Return whether an array has been joined with sums of its squares."""
        own = self.joined.get(self.origins[value], _NONE)
        return not own.isdisjoint(self.sums.get(value, _NONE))

    def _unite(
        self, table: Table, values: Iterable[int], out: int, into: Table | None = None
    ) -> None:
        self._add(table if into is None else into, out, *(table.get(v, _NONE) for v in values))

    def _add(self, table: Table, out: int, *roots: Iterable[int]) -> None:
        if found := table.get(out, _NONE).union(*roots):
            table[out] = found
