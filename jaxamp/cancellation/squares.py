"""Find products that sums of squares of their operands cancel.

Where points lie far from zero and near each other, `|a|² + |b|² - 2 abᵀ` is no larger than a
rounding of `abᵀ`. So is a covariance less the product of means, and any sum of a product and of
sums of squares of its operands, which are as large. A quadratic form is a square too, of an array
and a matrix: `aᵀPa + bᵀPb - 2 aᵀPb`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from jaxamp.cancellation.arrays import REDUCTIONS, SIGNS, Arrays, both_ways, chosen
from jaxamp.jaxprs.name_stack import is_backward
from jaxamp.plan.dataflow.constraints import CANCELLED, Constraint, free_axes
from jaxamp.plan.graph.consumers import SCALES, SUMS, closure, is_square, reached
from jaxamp.plan.graph.graph import Link, Node, Role


class Pair(NamedTuple):
    """Arrays that are multiplied, one if it is by itself, and whether products are summed."""

    arrays: frozenset[int]
    summed: bool


Pairs = frozenset[Pair]
_NONE: Pairs = frozenset()
_KEPT = frozenset((*SUMS, *SIGNS, "max", "min", "sqrt"))  # of results as of operands
_MOST = 64  # pairs of a sum: the loss of more layers is no distance
_ARRAYS = 16  # that a moment of arrays is made of, and each of these
_POWERS = ("square", "integer_pow", "pow")
_ADDING = frozenset((*SUMS, *REDUCTIONS))


def _is_power(node: Node) -> bool:
    """Return whether a node multiplies arrays element by element, whatever it is spelt with."""
    is_outer = node.name == "dot_general" and node.role is Role.ELEMENTWISE
    return is_outer or node.name in ("mul", *_POWERS)


class Squares:
    """Per value, the pairs of arrays whose products it has.

    A pair is an array with itself, or two of which sums are multiplied; it is as large as a product
    once it is summed.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.graph, self.arrays = arrays.graph, arrays
        self.origins = arrays.origins
        self.pairs: dict[int | None, Pairs] = {}
        self.forms: dict[frozenset[int], list[Node]] = {}
        for node in self.graph.nodes:
            if node.role is Role.MOVE or node.role is Role.LINK or node.name in REDUCTIONS:
                self._move(node)
            else:
                transfer = _BY_ROLE.get(node.role) or _BY_NAME.get(node.name)
                if transfer and (found := transfer(self, node)):
                    self.pairs[node.outs[0]] = found

    def _move(self, node: Node) -> None:
        for source, out in node.moves:
            if source in self.pairs and node.link is not Link.BACK:
                is_sum = node.name == "gather" or node.name in REDUCTIONS  # a diagonal has sums
                found = self.pairs[source]
                self.pairs[out] = _summed(found) if is_sum else found

    def _kept(self, node: Node) -> Pairs:
        found = frozenset(p for p in self._of(*chosen(node)) if p.summed)
        return found if len(found) <= _MOST else _NONE

    def _powers(self, node: Node) -> Pairs:
        found = self._kept(node)
        if is_square(node) or self.graph.constants.get(node.ins[-1]) == 2:
            found |= {Pair(frozenset({self.origins[node.ins[0]]}), summed=False)}
        return found

    def _multiplied(self, node: Node) -> Pairs:
        read = node.ins[:2]
        is_summed = free_axes(self.graph, node) == 0
        # A Gram matrix that multiplies something is a matrix like others.
        factors = [v for v in read if not self.arrays.product(v)]
        found = _summed(p for p in self._of(*factors) if not p.summed)
        if len({self.arrays.whole[v] for v in read}) == 1:
            found |= {Pair(frozenset(self.origins[v] for v in read), is_summed)}
        return found | self._form(node, is_summed)

    def _scaled(self, node: Node) -> Pairs:
        read = node.ins if node.name == "mul" else node.ins[:1]
        if found := self._of(*read):
            # The product of two norms is as large as the product of what they are of.
            all_sums = len(read) > 1 and all(map(self.has_sums, read))
            main = self._of(self.arrays.main(node))
            found = frozenset(p for p in found if all_sums or not p.summed or p in main)
        if node.name == "div":
            return found
        if len({self.arrays.whole[v] for v in node.ins}) == 1:
            found |= {Pair(frozenset(self.arrays.read(node)), summed=False)}
        return found

    def _of(self, *values: int | None) -> Pairs:
        found = _NONE
        for value in values:
            if pairs := self.pairs.get(value):
                found |= pairs
        return found

    def has_sums(self, value: int) -> bool:
        """Return whether a value has sums of squares."""
        return any(p.summed for p in self._of(value))

    def cancelled(self) -> Iterator[Node]:
        """Yield the products to which sums of squares of their operands are added."""
        yield from self._moments()
        for node in self.graph.nodes if self.pairs else ():
            if node.multiplies or node.name in _ADDING:
                yield from self._cancelled(node, self._added(node))
            if node.multiplies and any(map(self._has_own_squares, node.ins)):
                # Distances that are applied to something, and never formed, are two products.
                nodes = (node, *self._inner(node))
                found = [n for n in nodes if any(map(self._has_own_squares, n.ins))]
                if len(found) > 1 or all(map(self._has_own_squares, node.ins)):
                    yield from found

    def _cancelled(self, node: Node, added: Sequence[int]) -> Iterator[Node]:
        """Yield the products among what a node adds up that squares among the rest cancel."""
        for one in added if any(v in self.pairs for v in added) else ():
            others = [v for v in added if v != one]
            summed = [p.arrays for p in self._of(*others) if p.summed]
            if summed and (shared := self._with(one, summed)):
                forms = [n for pair in summed for n in self.forms.get(pair, ())]
                yield from (n for v in others for n in self._with(v, summed))
                yield from forms
                yield from (n for m in shared for n in (m, *(self._inner(m) if forms else ())))
                yield from [node] * node.multiplies

    def _added(self, node: Node) -> Sequence[int]:
        """Return the values that a node adds up, in place or joined before."""
        if node.name in SUMS:
            return node.ins
        is_weighed = node.multiplies and any(v in self.graph.constants for v in node.ins)
        if node.name not in REDUCTIONS and not is_weighed:
            return ()
        joined = self.arrays.makers.get(self.graph.origin(node.ins[0]))
        return joined.ins if joined and joined.role is Role.MERGE else ()

    def _with(self, value: int, pairs: list[frozenset[int]]) -> Collection[Node]:
        """Return the products in a sum that multiply the arrays of a pair."""
        found = {n for pair in pairs for n in self._products_of(pair) if n.outs[0] <= value}
        # Few sums have squares of what any product multiplies; others are not gone through.
        terms = closure([value], self._terms) if found else ()
        return dict.fromkeys(n for v in terms if (n := self.arrays.makers.get(v)) in found)

    def _products_of(self, pair: frozenset[int]) -> set[Node]:
        """Return the products that multiply the arrays of a pair."""
        return set.intersection(*(self._products.get(array, set()) for array in pair))

    @functools.cached_property
    def _products(self) -> dict[int, set[Node]]:
        """Per array, the products that multiply it, or what has its powers."""
        found: dict[int, set[Node]] = {}
        for node in self.graph.products:
            read = node.ins[:2]
            arrays = {self.origins[v] for v in read}
            factors = (p.arrays for p in self._of(*read) if not p.summed)
            powers = (n for v in arrays if (n := self.arrays.makers.get(v)) and _is_power(n))
            factors = itertools.chain(factors, map(self.arrays.read, powers))
            for array in arrays.union(*factors, *map(self._factors, read)):
                found.setdefault(array, set()).add(node)
        return found

    def _terms(self, value: int) -> Sequence[int]:
        """Return what a value is a sum or a multiple of, unless it is a product."""
        node = self.arrays.makers.get(value)
        if node is None or node.multiplies:
            return ()
        if node.role is Role.MOVE:
            return [source for source, out in node.moves if out == value]
        if node.role is Role.LINK or node.name in _KEPT or node.name in _POWERS:
            return node.ins
        main = self.arrays.main(node) if node.name in SCALES else None
        return () if main is None else (main,)

    def _moments(self) -> Iterator[Node]:
        """Yield the products of moments, `f(x * y) - f(x) * f(y)`, where `f` is one or several."""
        for one, other in both_ways(self.arrays.differences):
            means = self.arrays.makers.get(other)
            if self.arrays.product(one) and means and _is_power(means):
                yield from self._moment(self._made_by(one), means)

    def _moment(self, sums: list[Node], product: Node) -> Iterator[Node]:
        """Yield the products of a moment, of what makes its first term and of its second."""
        added, read, ends = self.arrays.added, self.arrays.read, product.ins[:2]
        summed = {self.origins[v] for v in ends if self.arrays.is_sum[v]}
        for power in (n for n in sums if _is_power(n) or n.multiplies):
            of = {*_nearest(read(power), lambda v: added.get(v, ()))}
            means = [self._made_by(v, of) for v in ends]
            averaged = {self.arrays.whole[v] for n in itertools.chain(*means) for v in n.ins}
            has_all = all(
                self.origins[v] in summed or self.arrays.whole[v] in averaged for v in power.ins
            )
            if (_is_power(power) or has_all) and all(
                (self.arrays.is_sum[v] and self.origins[v] in of)
                or any(self._is_mean(n, power, of) for n in mean)
                for v, mean in zip(ends, means, strict=False)
            ):
                made = itertools.chain(sums, [product], *means)
                yield from (n for n in made if n.multiplies)

    def _is_mean(self, node: Node, power: Node, of: Set[int]) -> bool:
        """Return whether a node reads what a power multiplies; another power, nothing but that."""
        read = self.arrays.read(node)
        is_read = read <= of if _is_power(node) else not read.isdisjoint(of)
        return node is not power and is_read

    def _made_by(self, value: int, of: Collection[int] = ()) -> list[Node]:
        """Return what makes an array, and the arrays whose products and sums it is, after some."""
        linear, added, makers = self.arrays.linear, self.arrays.added, self.arrays.makers

        def made_of(value: int) -> Iterable[int]:
            return () if value in of else linear.get(value) or added.get(value, ())

        found = _nearest([self.origins[value]], made_of)
        return [makers[v] for v in found if v in makers and v not in of]

    def _inner(self, node: Node) -> list[Node]:
        """Return the products that a node multiplies."""
        return [n for v in node.ins[:2] if (n := self.arrays.product(v))]

    def _factors(self, value: int) -> set[int]:
        """Return the array that a value is, or those whose product it is."""
        inner = self.arrays.product(value)
        return {self.origins[v] for v in inner.ins[:2]} if inner else {self.origins[value]}

    def _form(self, node: Node, summed: bool) -> Pairs:
        """Return the pair of an array that is multiplied by its product with a matrix."""
        inner = self._inner(node)
        if len(inner) != 1 or len(node.ins) < 2:
            return _NONE
        one, other = sorted(map(self._factors, node.ins[:2]), key=len)
        if not one < other or self._is_chain(node, inner[0], one):
            return _NONE
        self.forms.setdefault(frozenset(other), []).extend(inner)
        return frozenset({Pair(frozenset(other), summed)})

    def _is_chain(self, node: Node, inner: Node, one: set[int]) -> bool:
        """Return whether products follow each other, as in `(xW)Wᵀ`: `one` is not on both sides.

        Then the axis that is summed over is `one`'s in the inner product, too; in `(aP)aᵀ` it is
        the matrix's.
        """
        if {node.name, inner.name} != {"dot_general"}:
            return False
        place = [self.origins[v] for v in node.ins[:2]].index(inner.outs[0])
        summed = node.eqn.params["dimension_numbers"][0][place]
        axes = self._axes_of(node.ins[place], summed)
        (inner_summed, _), (batch, _) = inner.eqn.params["dimension_numbers"]
        of_first = self.graph.avals[inner.ins[0]].ndim - len(inner_summed)
        free = [axis for axis in axes if axis >= len(batch)]
        return bool(free) and {self.origins[inner.ins[axis >= of_first]] for axis in free} <= one

    def _axes_of(self, value: int, axes: Sequence[int]) -> Sequence[int]:
        """Return which axes of an array a value's are; none if it is reshaped."""
        for node, source in self.arrays.path(value):
            if node.name == "transpose":
                axes = [node.eqn.params["permutation"][axis] for axis in axes]
            elif self.graph.avals[source].shape != self.graph.avals[node.outs[0]].shape:
                return ()
        return axes

    def _has_own_squares(self, value: int) -> bool:
        """Return whether an array has been joined with sums of its squares."""
        own = self.arrays.joined.get(self.origins[value], frozenset())
        return any(p.arrays <= own for p in self._of(value) if p.summed)


_BY_ROLE = {Role.CONTRACT: Squares._multiplied, Role.MERGE: Squares._kept}
_BY_NAME = {
    "dot_general": Squares._multiplied,
    **dict.fromkeys(SCALES, Squares._scaled),
    **dict.fromkeys(_POWERS, Squares._powers),
    **dict.fromkeys(_KEPT, Squares._kept),
}


def _nearest(start: Iterable[int], made_of: Callable[[int], Iterable[int]]) -> Iterator[int]:
    """Yield what arrays are made of, a few maps of a moment far: a flow is as long as a network."""
    return itertools.islice(reached(start, made_of), _ARRAYS)


def _summed(pairs: Iterable[Pair]) -> Pairs:
    return frozenset(p._replace(summed=True) for p in pairs)


def find_cancelled(squares: Squares) -> dict[Node, Constraint]:
    """Return the products that sums of squares cancel, with the reason."""
    return dict.fromkeys(squares.cancelled(), CANCELLED)


def find_transposed(
    arrays: Arrays, found: Mapping[Node, Constraint], products: Iterable[Node]
) -> dict[Node, Constraint]:
    """Return the products of a backward pass that multiply cotangents of some, with reasons."""
    sizes = arrays.graph.sizes
    cotangents = {
        (arrays.whole[v], sizes[node.outs[0]]): node
        for node in sorted(found, key=lambda node: -node.index)
        for v in node.ins[:2]
        if not is_backward(node.scope)
    }
    backward = [n for n in products if is_backward(n.scope)] if cotangents else []
    return {
        node: found[of]
        for node in backward
        for v, cotangent in (node.ins[:2], node.ins[1::-1])
        if (of := cotangents.get((arrays.whole[v], sizes[cotangent]))) and of.index < node.index
    }
