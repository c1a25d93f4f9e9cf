"""Find products that sums of squares of their operands cancel.

Where points lie far from zero and near each other, `|a|² + |b|² - 2 abᵀ` is no larger than a
rounding of `abᵀ`. So is a covariance less the product of means, and any sum of a product and of
sums of squares of its operands, which are as large. A quadratic form is a square too, of an array
and a matrix: `aᵀPa + bᵀPb - 2 aᵀPb`.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxamp.core.guards import Guard
from jaxamp.core.taxonomy import Trait
from jaxamp.jaxprs.name_stack import is_backward
from jaxamp.plan.dataflow.constraints import Constraint, free_axes
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, is_smaller

CANCELLED = Constraint("sums of squares of its operands nearly cancel it", Guard.SENSITIVE)


class Pair(NamedTuple):
    """Arrays that are multiplied, one if it is by itself, and whether products are summed."""

    arrays: frozenset[int]
    summed: bool


Pairs = frozenset[Pair]
_NONE: Pairs = frozenset()
_EMPTY: frozenset[int] = frozenset()
_SUMS = ("add", "sub")
_SCALES = ("mul", "div")
_SIGNS = ("neg", "abs", "select_n")
_KEPT = (*_SUMS, *_SIGNS, "max", "min", "sqrt")  # of results as of operands
_POWERS = ("square", "integer_pow", "pow")
ADDS = (*_SUMS, "add_any", "scatter-add", "scatter-sub")
_TERMS = 4  # what a longer sum adds up counts as one: a residual stream is as long as a network
_REDUCTIONS = ("reduce_sum", "psum", "psum_invariant")
_ADDING = frozenset((*_SUMS, *_REDUCTIONS))
_KEPT_OR_SCALED = frozenset((*_KEPT, *_SCALES))


def is_square(node: Node) -> bool:
    """Return whether a node multiplies a value by itself."""
    if node.name == "mul":
        return node.ins[0] == node.ins[1]
    return node.name in ("square", "integer_pow") and node.eqn.params.get("y", 2) == 2


def _is_power(node: Node) -> bool:
    """Return whether a node multiplies arrays element by element, whatever it is spelt with."""
    is_outer = node.name == "dot_general" and node.role is Role.ELEMENTWISE
    return is_outer or node.name in ("mul", *_POWERS)


def chosen(node: Node) -> tuple[int, ...]:
    """Return the operands of a node but for what chooses among them."""
    return node.ins[1:] if node.name == "select_n" else node.ins


def multiplies(node: Node) -> bool:
    """Return whether a node is a product of matrices, or an outer one: an elementwise role."""
    return node.role is Role.CONTRACT or node.name == "dot_general"


class Squares:
    """Per value, the array that it is made of, and the pairs of arrays whose products it has.

    An array that is moved, masked or scaled by known or smaller ones is the same array, and so is
    its sum over an axis, or its slice in a loop. A pair is an array with itself, or two
    of which sums are multiplied; it is as large as a product once it is summed. A product, and
    what a solver makes of one, is `linear` in each of its operands.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.sizes = graph.sizes.copy()  # of values as they were before they were repeated
        for value in graph.moved_from:
            whole = graph.sizes[graph.origin(value)]
            if is_smaller(whole, self.sizes[value]):
                self.sizes[value] = whole
        self.origins = list(range(len(graph.avals)))
        self.whole = self.origins.copy()  # as `origins`, but a part is an array of its own
        self.is_sum = bytearray(len(graph.avals))
        self.pairs: dict[int | None, Pairs] = {}
        self.joined: dict[int, frozenset[int]] = {}
        self.forms: dict[frozenset[int], list[Node]] = {}
        self.makers: dict[int, Node] = {}
        self.linear: dict[int, frozenset[int]] = {}  # what a product reads; see `is_linear`
        self.added: dict[int, frozenset[int]] = {}  # the terms of a sum
        self.carried: dict[int, frozenset[int]] = {}  # what an array is in a loop's next iteration
        self.is_negative = bytearray(len(graph.avals))
        for node in graph.nodes:
            for out in node.outs:
                self.makers[out] = node
            if node.role is Role.MOVE:
                for source, out in node.moves:
                    self._follow(source, out, summed=self._is_smaller(out, source))
            elif node.name in _REDUCTIONS:
                for source, out in node.moves:
                    self._follow(source, out, summed=True)
                    self.is_sum[out] = 1
            elif node.role is Role.LINK:
                if node.link is not Link.BACK:
                    self._follow(node.ins[0], node.outs[0])
                else:
                    first, last = (self.origins[v] for v in (*node.outs, *node.ins))
                    self.carried[first] = self.carried.get(first, _EMPTY) | {last}
            elif node.outs and node.ins:
                self._make(node, node.outs[0], node.ins)

    def cancelled(self) -> Iterator[Node]:
        """Yield the products to which sums of squares of their operands are added."""
        for node in self.graph.nodes if self.pairs else ():
            if node.name not in _ADDING and not multiplies(node):
                continue
            added = self._added(node)
            for one in added if any(v in self.pairs for v in added) else ():
                others = [v for v in added if v != one]
                summed = [p.arrays for p in self._of(*others) if p.summed]
                if summed and (shared := self._with(one, summed)):
                    forms = [pair for pair in summed if pair in self.forms]
                    yield from [n for v in others for n in self._with(v, summed)]
                    yield from [n for pair in forms for n in self.forms[pair]]
                    yield from (n for m in shared for n in (m, *(self._inner(m) if forms else ())))
                    yield from [node] * multiplies(node)
            if node.name == "sub" and not is_backward(node.scope):
                yield from self._moments(*node.ins)
            if multiplies(node) and any(map(self._has_own_squares, node.ins)):
                # Distances that are applied to something, and never formed, are two products.
                nodes = (node, *self._inner(node))
                found = [n for n in nodes if any(map(self._has_own_squares, n.ins))]
                if len(found) > 1 or all(map(self._has_own_squares, node.ins)):
                    yield from found

    def _moments(self, one: int, other: int) -> Sequence[Node]:
        """Return the products of a moment: `f(x * y) - f(x) * f(y)`, `x.T @ x - f(x) * f(x)`."""
        mean, product = (self.makers.get(self.origins[v]) for v in (one, other))
        if mean is None or product is None or product.name != "mul" or not multiplies(mean):
            return ()
        means = self._inner(product)
        read = [self.makers[o] for v in mean.ins if (o := self.origins[v]) in self.makers]
        factors = [self.read(n) for n in read if _is_power(n)]
        factors += [self.read(mean)] if len(self.read(mean)) == 1 else []
        is_mean = any(all(self._is_mean(m, f) for m in means) for f in factors)
        return (mean, *means) if is_mean and len(means) > 1 else ()

    def _is_mean(self, node: Node, of: set[int]) -> bool:
        """Return whether a product is a mean of arrays, or of powers of them."""
        powers = [n for v in node.ins if (n := self.makers.get(self.origins[v])) and _is_power(n)]
        is_of_power = any(self.origins[v] in of for n in powers for v in n.ins)
        return is_of_power or self.is_linear(node.outs[0], of)

    def transposed(
        self, found: Mapping[Node, Constraint], products: Iterable[Node]
    ) -> dict[Node, Constraint]:
        """Return the products of a backward pass that multiply cotangents of some, with reasons."""
        sizes = self.graph.sizes
        cotangents = {
            (self.whole[v], sizes[node.outs[0]]): why
            for node, why in found.items()
            for v in node.ins[:2]
            if not is_backward(node.scope)
        }
        backward = [n for n in products if is_backward(n.scope)] if cotangents else []
        return {
            node: cotangents[key]
            for node in backward
            for v, cotangent in (node.ins[:2], node.ins[1::-1])
            if (key := (self.whole[v], sizes[cotangent])) in cotangents
        }

    def differences(self) -> Iterator[tuple[int, int]]:
        """Yield arrays of which one is subtracted from the other, in sums of few terms."""
        for node in (n for name in ADDS for n in self.graph.named.get(name, ())):
            if not is_backward(node.scope):
                left, right = (self._added_up(v) for v in (node.ins[0], node.ins[-1]))
                flips = node.name.endswith("sub")
                pairs = [(a, b) for a, s in left for b, t in right if s ^ t ^ flips]
                yield from dict.fromkeys((*pairs, *((b, a) for a, b in pairs)))

    def _added_up(self, value: int) -> list[tuple[int, int]]:
        """Return the array of a value, and the nearest terms of its sum, each with its sign."""
        pending, terms = [(value, 0)], list[tuple[int, int]]()
        for made, sign in pending:
            sign ^= self.is_negative[made]
            terms.append((self.origins[made], sign))
            node = self.makers.get(self.origins[made])
            if node and node.name in ADDS and not self.is_sum[made] and len(pending) < _TERMS:
                pending.append((node.ins[0], sign))
                pending.append((node.ins[-1], sign ^ node.name.endswith("sub")))
        return terms

    def read(self, node: Node) -> set[int]:
        """Return the arrays that a node reads."""
        return {self.origins[v] for v in node.ins}

    def path(self, value: int) -> Iterator[tuple[Node, int]]:
        """Yield the nodes that move and scale a value's array, last first, and what each reads."""
        while value != self.origins[value]:
            node = self.makers[value]
            made = (v for v in node.ins if v < value)  # others come round a loop
            source = next((v for v in made if self.origins[v] == self.origins[value]), None)
            if source is None:
                return
            yield node, source
            value = source

    def scales(self, value: int) -> set[int]:
        """Return what a value's array has been multiplied with or divided by."""
        scaled = (pair for pair in self.path(value) if pair[0].name in _SCALES)
        return {self.origins[v] for node, source in scaled for v in node.ins if v != source}

    def has_sums(self, value: int) -> bool:
        """Return whether a value has sums of squares."""
        return any(p.summed for p in self._of(value))

    def is_whole_part(self, value: int, of: int) -> bool:
        """Return whether a value is another rounded to whole numbers, or to multiples of one."""
        pending = [value]
        for made in pending:
            node = self.makers.get(made)
            if node is None:
                continue
            if node.trait is Trait.INTEGRAL and self.origins[node.ins[0]] == self.origins[of]:
                return True
            read = [v for v in chosen(node) if v not in self.graph.constants]
            if node.role in (Role.MOVE, Role.CONVERT) or node.name in _SCALES:
                pending += read if len(read) == 1 else ()
            elif node.name == "select_n":
                pending += read
        return False

    def _added(self, node: Node) -> Sequence[int]:
        """Return the values that a node adds up, in place or joined before."""
        if node.name in _SUMS:
            return node.ins
        is_weighed = multiplies(node) and any(v in self.graph.constants for v in node.ins)
        if node.name not in _REDUCTIONS and not is_weighed:
            return ()
        joined = self.makers.get(self.graph.origin(node.ins[0]))
        return joined.ins if joined and joined.role is Role.MERGE else ()

    def _factors(self, value: int) -> set[int]:
        """Return the array that a value is, or those whose product it is."""
        made = self.origins[value]
        if not self._is_product(made):
            return {made}
        return {self.origins[v] for v in self.makers[made].ins[:2]}

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
        """Return which axes of an array a value's are; none if it is reshaped, or in a loop."""
        for node, source in self.path(value):
            if node.role is Role.LINK:
                return ()
            if node.name == "transpose":
                axes = [node.eqn.params["permutation"][axis] for axis in axes]
            elif self.graph.avals[source].shape != self.graph.avals[node.outs[0]].shape:
                return ()
        return axes

    def _inner(self, node: Node) -> list[Node]:
        """Return the products that a node multiplies."""
        return [self.makers[o] for v in node.ins[:2] if self._is_product(o := self.origins[v])]

    def _of(self, *values: int | None) -> Pairs:
        found = _NONE
        for value in values:
            if pairs := self.pairs.get(value):
                found |= pairs
        return found

    def _follow(self, source: int, out: int, summed: bool = False) -> None:
        self.origins[out], self.is_sum[out] = self.origins[source], self.is_sum[source]
        self.is_negative[out] = self.is_negative[source]
        self.whole[out] = out if summed else self.whole[source]
        if pairs := self.pairs.get(source):
            self.pairs[out] = _summed(pairs) if summed else pairs

    def _make(self, node: Node, out: int, ins: tuple[int, ...]) -> None:
        one, arrays = ins[0], frozenset(self.origins[v] for v in ins)
        is_product = multiplies(node) or node.role is Role.FIXED or self._is_outer(node, out)
        if is_product and not is_backward(node.scope):
            self.linear[out] = arrays.union(*(self.joined.get(v, _EMPTY) for v in arrays))
        elif node.name in ADDS:
            self.added[out] = arrays
        if node.role is Role.MERGE:
            self.joined[out] = arrays
            found = frozenset(p for p in self._of(*ins) if p.summed)
        elif multiplies(node):
            are_sums = all(self.is_sum[v] for v in ins[:2])
            is_inner = free_axes(self.graph, node) == 0 or are_sums
            # A Gram matrix that multiplies something is a matrix like others.
            factors = [v for v in ins[:2] if not self._is_product(self.origins[v])]
            found = _summed(p for p in self._of(*factors) if not p.summed)
            if are_sums or len({self.whole[v] for v in ins[:2]}) == 1:
                found |= {Pair(frozenset(self.origins[v] for v in ins[:2]), is_inner)}
            found |= self._form(node, is_inner)
        elif node.name in _POWERS:
            found = frozenset(p for p in self._of(one) if p.summed)
            if is_square(node) or self.graph.constants.get(ins[-1]) == 2:
                found |= {Pair(frozenset({self.origins[one]}), summed=False)}
        elif node.name in _KEPT_OR_SCALED:
            found = self._scale(node, out, arrays)
        else:
            return
        if found:
            self.pairs[out] = found

    def _scale(self, node: Node, out: int, arrays: frozenset[int]) -> Pairs:
        main = None if node.name in _KEPT and node.name not in _SIGNS else self.main(node)
        if main is not None and not is_square(node):
            known, (one, other) = self.graph.constants, node.ins[:1] + node.ins[-1:]
            number = 0.0 if node.name in _SIGNS else known.get(one, known.get(other, 0.0))
            self.origins[out], self.is_sum[out] = self.origins[main], self.is_sum[main]
            self.whole[out] = self.whole[main]
            self.is_negative[out] = self.is_negative[main] ^ (node.name == "neg" or number < 0)
        if node.name in _KEPT:
            # What is added to squares is as large as they are, before they are summed.
            known = () if node.name in _SUMS else self.graph.constants
            read = [v for v in chosen(node) if v not in known]
            if not (found := self._of(*read)):
                return found
            are_squares = all(any(not p.summed for p in self._of(v)) for v in read)
            return frozenset(p for p in found if p.summed or are_squares)
        read = node.ins if node.name == "mul" else node.ins[:1]
        if found := self._of(*read):
            # The product of two norms is as large as the product of what they are of.
            all_sums = len(read) > 1 and all(map(self.has_sums, read))
            found = frozenset(p for p in found if all_sums or not p.summed or p in self._of(main))
        are_sums = [bool(self.is_sum[v]) for v in node.ins]
        is_own = len({self.whole[v] for v in node.ins}) == 1
        if node.name == "mul" and (is_own or all(are_sums)):
            found |= {Pair(arrays, any(are_sums))}
        return found | self._form(node, any(are_sums)) if node.name == "mul" else found

    def main(self, node: Node) -> int | None:
        """Return the operand that known or smaller numbers scale, or a mask, if there is one."""
        if node.name == "mul" and self._is_outer(node, node.outs[0]):
            return None
        known = self.graph.constants
        read = [v for v in chosen(node) if v not in known and not self.is_mask(v)]
        for value in read:
            if all(self._is_smaller(v, value) for v in read if v != value):
                return value if node.name != "div" or value == node.ins[0] else None
        return None

    def is_mask(self, value: int) -> bool:
        """Return whether a value is a boolean array made a number."""
        node = self.makers.get(self.origins[value])
        if node is None or node.role is not Role.CONVERT:
            return False
        return self.graph.kinds[node.ins[0]] == "b"

    def _is_smaller(self, value: int, other: int) -> bool:
        return is_smaller(self.sizes[value], self.sizes[other])

    def _with(self, value: int, pairs: list[frozenset[int]]) -> list[Node]:
        """Return the products in a sum that multiply the arrays of a pair."""
        found, seen, pending = list[Node](), {value}, [value]
        for made in pending:
            node = self.makers.get(made)
            if node is None:
                continue
            if multiplies(node):
                read = node.ins[:2]
                arrays = {self.origins[v] for v in read}.union(*(p.arrays for p in self._of(*read)))
                of_forms = arrays.union(*map(self._factors, read))
                found += [node] * any(
                    pair <= (of_forms if pair in self.forms else arrays) for pair in pairs
                )
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
        main = self.main(node) if node.name in _SCALES else None
        return () if main is None else (main,)

    def is_linear(self, value: int, arrays: Collection[int], sums: bool = False) -> bool:
        """Return whether products, solvers, and sums if so said, make a value of some arrays."""
        seen, pending, first = {value}, [-value], min(arrays, default=value)
        while pending:
            made = -heapq.heappop(pending)  # the newest first: what makes a value is near
            read = self.linear.get(made, _EMPTY)
            if sums:
                read = read.union(self.added.get(made, ()), self.carried.get(made, ()))
            if not read.isdisjoint(arrays):
                return True
            for v in read - seen:
                # What is older than all of them is made of none, unless it changes in a loop.
                if v > first or (sums and v in self.carried):
                    heapq.heappush(pending, -v)
            seen |= read
        return False

    def _is_outer(self, node: Node, out: int) -> bool:
        """Return whether elements of smaller arrays are multiplied by each other."""
        size = self.graph.sizes[out]
        return node.name == "mul" and all(is_smaller(self.sizes[v], size) for v in node.ins)

    def _is_product(self, value: int) -> bool:
        return value in self.makers and multiplies(self.makers[value])

    def _has_own_squares(self, value: int) -> bool:
        """Return whether an array has been joined with sums of its squares."""
        own = self.joined.get(self.origins[value], _EMPTY)
        return any(p.arrays <= own for p in self._of(value) if p.summed)


def _summed(pairs: Iterable[Pair]) -> Pairs:
    return frozenset(p._replace(summed=True) for p in pairs)


def find_cancelled(squares: Squares) -> dict[Node, Constraint]:
    """Return the products that sums of squares cancel, with the reason."""
    return dict.fromkeys(squares.cancelled(), CANCELLED)
