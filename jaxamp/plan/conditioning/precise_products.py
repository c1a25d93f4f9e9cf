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
from typing import NamedTuple

from jaxamp.core.guards import Guard
from jaxamp.core.semantics import Linear
from jaxamp.jaxprs.contracted import size, terms
from jaxamp.jaxprs.name_stack import is_backward
from jaxamp.plan.dataflow.constraints import Constraint, free_axes
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, is_smaller
from jaxamp.plan.graph.sweeps import backward

CANCELLED = Constraint("sums of squares of its operands nearly cancel it", Guard.SENSITIVE)
PHASE = Constraint("the phase of a periodic function", Guard.SENSITIVE)


class Pair(NamedTuple):
    """Arrays that are multiplied, one if it is by itself, and whether products are summed."""

    arrays: frozenset[int]
    summed: bool


Pairs = frozenset[Pair]
_SMALL = 8  # what is a smaller part of the arithmetic than one in so many is not missed
_NONE: Pairs = frozenset()
_SUMS = ("add", "sub")
_SCALES = ("mul", "div")
_SIGNS = ("neg", "abs", "select_n")
_KEPT = (*_SUMS, *_SIGNS, "max", "min", "sqrt")  # of results as of operands
_POWERS = ("square", "integer_pow", "pow")
_REDUCTIONS = ("reduce_sum", "psum", "psum_invariant")


def find_precise_products(graph: Graph) -> None:
    """Enter into a graph its products that are not to be rounded, and what these read."""
    products = [n for n in graph.nodes if _multiplies(n) and len(n.ins) > 1]
    squares = _Squares(graph)
    found = dict.fromkeys(squares.cancelled(), CANCELLED)
    found = dict.fromkeys(_phases(graph, products), PHASE) | found
    for node, why in list(found.items()):
        if not is_backward(node.scope):
            found.update(dict.fromkeys(squares.transposed(node, products), why))
    graph.precise = found
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
        if _multiplies(node) or any(made[v] for v in node.ins):
            for out in node.outs:
                made[out] = 1
    phases = [n for n in products if bits[n.outs[0]] and not is_backward(n.scope)]
    of_layers = {n for n in phases if any(made[v] for v in n.ins)}
    part, whole = (sum(_work(graph, n) for n in nodes) for nodes in (of_layers, products))
    return phases if part * _SMALL <= whole else [n for n in phases if n not in of_layers]


def _is_periodic(graph: Graph, node: Node) -> bool:
    is_wave = node.name == "exp" and graph.kinds[node.outs[0]] == "c"
    return is_wave or (node.semantics.periodic and graph.kinds[node.outs[0]] == "f")


def _multiplies(node: Node) -> bool:
    """Return whether a node is a product of matrices, or an outer one: an elementwise role."""
    return node.role is Role.CONTRACT or node.name == "dot_general"


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
    """Per value, the array that it is made of, and the pairs of arrays whose products it has.

    An array that is moved, masked or scaled by known or smaller ones is the same array, and so is
    its sum over an axis, or its slice in a loop. A pair is an array with itself, or two
    of which sums are multiplied; it is as large as a product once it is summed.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.origins = list(range(len(graph.avals)))
        self.whole = self.origins.copy()  # as `origins`, but a part is an array of its own
        self.is_sum = bytearray(len(graph.avals))
        self.pairs: dict[int, Pairs] = {}
        self.joined: dict[int, set[int]] = {}
        self.makers: dict[int, Node] = {}
        for node in graph.nodes:
            self.makers.update(dict.fromkeys(node.outs, node))
            if node.role is Role.MOVE:
                for source, out in node.moves:
                    self._follow(source, out, summed=is_smaller(*self._sizes(out, source)))
            elif node.name in _REDUCTIONS:
                for source, out in node.moves:
                    self._follow(source, out, summed=True)
                    self.is_sum[out] = 1
            elif node.role is Role.LINK:
                if node.link is not Link.BACK:
                    self._follow(node.ins[0], node.outs[0])
            elif node.outs and node.ins:
                self._make(node, node.outs[0], node.ins)

    def cancelled(self) -> Iterator[Node]:
        """Yield the products to which sums of squares of their operands are added."""
        for node in self.graph.nodes if self.pairs else ():
            if node.name in _SUMS and len(node.ins) == 2:
                for one, other in (node.ins, node.ins[::-1]):
                    summed = [set(p.arrays) for p in self._of(other) if p.summed]
                    if summed and (shared := self._with(one, summed)):
                        yield from (*shared, *self._with(other, summed))
            elif _multiplies(node) and any(map(self._has_own_squares, node.ins)):
                # Distances that are applied to something, and never formed, are two products.
                inner = [self.makers[o] for v in node.ins if self._is_product(o := self.origins[v])]
                found = [n for n in (node, *inner) if any(map(self._has_own_squares, n.ins))]
                if len(found) > 1 or all(map(self._has_own_squares, node.ins)):
                    yield from found

    def transposed(self, node: Node, products: Sequence[Node]) -> Iterator[Node]:
        """Yield the products of a backward pass that multiply a product's cotangent."""
        sizes, own = self.graph.sizes, {self.whole[v] for v in node.ins[:2]}
        for other in products:
            if is_backward(other.scope):
                pairs = (other.ins[:2], other.ins[1::-1])
                if sizes[node.outs[0]] in [sizes[g] for v, g in pairs if self.whole[v] in own]:
                    yield other

    def _of(self, *values: int | None) -> Pairs:
        return _NONE.union(*(self.pairs.get(v, _NONE) for v in values if v is not None))

    def _follow(self, source: int, out: int, summed: bool = False) -> None:
        self.origins[out], self.is_sum[out] = self.origins[source], self.is_sum[source]
        self.whole[out] = out if summed else self.whole[source]
        if pairs := self.pairs.get(source):
            self.pairs[out] = _summed(pairs) if summed else pairs

    def _make(self, node: Node, out: int, ins: tuple[int, ...]) -> None:
        one, arrays = ins[0], {self.origins[v] for v in ins}
        if node.role is Role.MERGE:
            self.joined[out] = arrays
            found = frozenset(p for p in self._of(*ins) if p.summed)
        elif _multiplies(node):
            are_sums = all(self.is_sum[v] for v in ins[:2])
            is_inner = free_axes(self.graph, node) == 0 or are_sums
            # A Gram matrix that multiplies something is a matrix like others.
            factors = [v for v in ins[:2] if not self._is_product(self.origins[v])]
            found = _summed(p for p in self._of(*factors) if not p.summed)
            if are_sums or len({self.whole[v] for v in ins[:2]}) == 1:
                found |= {Pair(frozenset(self.origins[v] for v in ins[:2]), is_inner)}
        elif node.name in _POWERS:
            found = frozenset(p for p in self._of(one) if p.summed)
            if is_square(node) or self.graph.constants.get(ins[-1]) == 2:
                found |= {Pair(frozenset({self.origins[one]}), summed=False)}
        elif node.name in (*_KEPT, *_SCALES):
            found = self._scale(node, out, arrays)
        else:
            return
        if found:
            self.pairs[out] = found

    def _scale(self, node: Node, out: int, arrays: set[int]) -> Pairs:
        main = self._main(node)
        if main is not None and node.name in (*_SCALES, *_SIGNS):
            self.origins[out], self.is_sum[out] = self.origins[main], self.is_sum[main]
            self.whole[out] = self.whole[main]
        if node.name in _KEPT:
            # What is added to squares is as large as they are, before they are summed.
            known = () if node.name in _SUMS else self.graph.constants
            read = [v for v in _chosen(node) if v not in known]
            are_squares = all(any(not p.summed for p in self._of(v)) for v in read)
            return frozenset(p for p in self._of(*read) if p.summed or are_squares)
        read = node.ins if node.name == "mul" else node.ins[:1]
        found = frozenset(p for p in self._of(*read) if not p.summed or p in self._of(main))
        are_sums = [bool(self.is_sum[v]) for v in node.ins]
        is_square = len({self.whole[v] for v in node.ins}) == 1
        if node.name == "mul" and (is_square or all(are_sums)):
            found |= {Pair(frozenset(arrays), any(are_sums))}
        return found

    def _main(self, node: Node) -> int | None:
        """Return the operand that known or smaller numbers scale, if there is one."""
        read = [v for v in _chosen(node) if v not in self.graph.constants]
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

    def _with(self, value: int, pairs: list[set[int]]) -> list[Node]:
        """Return the products in a sum that multiply the arrays of a pair."""
        found, seen, pending = list[Node](), {value}, [value]
        for made in pending:
            node = self.makers.get(made)
            if node is None:
                continue
            if _multiplies(node):
                read = node.ins[:2]
                arrays = {self.origins[v] for v in read}.union(*(p.arrays for p in self._of(*read)))
                found += [node] * any(pair <= arrays for pair in pairs)
                continue
            new = [v for v in self._terms(node, made) if v not in seen]
            pending += new
            seen.update(new)
        return found

    def _terms(self, node: Node, value: int) -> Sequence[int]:
        """Return what a value is a sum or a multiple of."""
        if node.role is Role.MOVE:
            return [source for source, out in node.moves if out == value]
        if node.role is Role.LINK:
            return () if node.link is Link.BACK else node.ins
        if node.name in (*_KEPT, *_POWERS):
            return node.ins
        main = self._main(node) if node.name in _SCALES else None
        return () if main is None else (main,)

    def _is_product(self, value: int) -> bool:
        return value in self.makers and _multiplies(self.makers[value])

    def _has_own_squares(self, value: int) -> bool:
        """Return whether an array has been joined with sums of its squares."""
        own = self.joined.get(self.origins[value], set())
        return any(p.arrays <= own for p in self._of(value) if p.summed)


def _chosen(node: Node) -> tuple[int, ...]:
    return node.ins[1:] if node.name == "select_n" else node.ins


def _summed(pairs: Iterable[Pair]) -> Pairs:
    return frozenset(p._replace(summed=True) for p in pairs)
