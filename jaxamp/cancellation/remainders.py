"""Find products that are subtracted from what they multiply: what remains may be small.

`x - (x @ q) @ q.T` leaves what a subspace does not hold, `x - weights @ x` distances from a mean, a
Laplacian `degree * x - a @ x` those of neighbours. The matrix may be formed before: `eye(n) - 1/n`,
`diag(degree) - a`, or whatever known numbers add up to nothing in most rows. A Schur complement, as
the variance of a Gaussian process, is what remains of `c` in `c - k.T @ solve(a, k)`, or of its
diagonal in `c - sum(k * solve(a, k), 0)`. A solution leaves `b - a @ x`, whatever is added to `x`.
Two products of one array are as alike, such as means or selected rows. And distances that squares
cancel, `|x|² - 2 x @ m.T + |m|²`, are differences of `x` and `m` as well. So are slopes of a
network: see `finite_differences.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxamp.cancellation.arrays import Arrays, both_ways
from jaxamp.cancellation.finite_differences import find_slopes
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.known_values import KnownValues
from jaxamp.plan.graph.consumers import descendants, is_square
from jaxamp.plan.graph.graph import Graph, Link, Node, Role

_NONE: frozenset[int] = frozenset()
_ROUNDING = 2.0**-24
_CANCELS = 8  # of weights: so many times their sum is that of their sizes
_SOLVERS = ("custom_linear_solve", "linear_solve", "triangular_solve")


def find_remainders(
    arrays: Arrays, products: Iterable[Node], cancelled: Iterable[Node], known: KnownValues
) -> dict[Node, Sequence[int]]:
    """Return the products that are subtracted from what they multiply, each with arrays of that."""
    graph = arrays.graph
    found, differences, parted = dict[Node, Sequence[int]](), set[int](), set[int]()
    balanced = _Balanced(arrays, known)
    for node in products:
        if all(map(known.is_made, node.ins)):
            continue  # to compute what it multiplies takes longer than all else
        read = arrays.read(node)
        # A form, `x.T @ (laplacian @ x)`, is a sum of differences by what these are of.
        is_form = any(arrays.is_linear(v, read) for v in read & differences)
        if is_form or any(map(balanced.has, node.ins)):
            found.update(dict.fromkeys((node, *_factors(arrays, node.ins)), node.ins))
            differences.update(node.outs)
            parted.update(node.ins)
    solves = (n for name in _SOLVERS for n in graph.named.get(name, ()))
    solved = {v for n in solves for v in n.outs if n.trait is Trait.SOLVER or v in graph.factors}
    made_of: dict[int, list[int]] = {}
    for one, other in (*both_ways(arrays.differences), *arrays.distances(cancelled)):
        if solved and (read := _multiplied(arrays, other, solved)):
            # Products that a solver reads are float32 whatever their share, and so are these.
            found.update(dict.fromkeys(_factors(arrays, (one, other, *read)), ()))
        elif other not in arrays.linear:
            continue
        elif arrays.is_linear(other, (one,)) or (
            one != other and _is_residual(arrays, other, of=one)
        ):
            made_of.setdefault(one, []).append(other)
        else:
            found.update(_alike(arrays, known, one, other))
    for one, others in made_of.items():
        found.update(dict.fromkeys(_factors(arrays, others, of=one), (one,)))
    found.update((node, node.ins) for node in _orthogonal(arrays, known))
    slopes = find_slopes(arrays, known, parted | made_of.keys(), balanced.weighs)
    return {n: found.get(n, ()) for n in products if n in found or n in slopes}


def _multiplied(arrays: Arrays, value: int, solved: set[int]) -> Sequence[int]:
    """Return what is multiplied in `k.T @ solve(a, k)` or `sum(v**2)` of a solved `v`, if it is."""
    node = arrays.makers.get(value)
    if node is None or not (node.multiplies or node.name == "mul" or is_square(node)):
        return ()
    read = [arrays.origins[v] for v in node.ins]
    by_solver = [v in solved or arrays.is_linear(v, solved) for v in read]
    one, other = read[0], read[-1]
    is_form = arrays.is_linear(one, (other,)) or arrays.is_linear(other, (one,))
    is_found = any(by_solver) if is_form or node.multiplies else all(by_solver)
    return read if is_found else ()


def _is_residual(arrays: Arrays, value: int, of: int) -> bool:
    """Return whether a value is `a @ x` of a solution `x`, which `a` and the array made.

    Not if each iteration of a loop has an `a` of its own: a state that learns pairs, by the delta
    rule, one or some at a time, solves for none of them.
    """
    if (node := arrays.product(value)) is None:
        return False
    return any(
        not any(n.link is Link.SLICE for n, _ in arrays.path(a))
        and all(
            arrays.is_linear(arrays.origins[x], (v,), sums=True) for v in (of, arrays.origins[a])
        )
        for x, a in (node.ins[:2], node.ins[1::-1])
    )


def _alike(
    arrays: Arrays, known: KnownValues, one: int, other: int
) -> Mapping[Node, Sequence[int]]:
    """Return two products of one array, with that, by known numbers or arrays of one another.

    Or one by known numbers, of which parts are subtracted.
    """
    nodes = [n for v in {one, other} if (n := arrays.product(v))]
    by_known = all(any(map(known.is_made, n.ins)) for n in nodes)
    if len(nodes) < 2:
        return {n: n.ins for n in nodes if one == other and by_known}
    for (a, x), (b, y) in itertools.product(*((n.ins[:2], n.ins[1::-1]) for n in nodes)):
        for made, of in (a, b), (b, a):
            if arrays.whole[x] == arrays.whole[y] and (by_known or _is_of(arrays, made, of)):
                return dict.fromkeys(nodes, (x, of))
    return {}


def _is_of(arrays: Arrays, made: int, of: int) -> bool:
    """Return whether sums, products or rounding to whole multiples make an array of another."""
    one, other = arrays.origins[made], arrays.origins[of]
    is_linear = one == other or arrays.is_linear(one, (other,), sums=True)
    return is_linear or arrays.is_whole_part(made, of)


def _orthogonal(arrays: Arrays, known: KnownValues) -> Iterator[Node]:
    """Yield the products of an array with itself beside an identity matrix: `q.T @ q - eye(n)`."""
    graph = arrays.graph
    for node in graph.named.get("sub", ()):
        for one, other in (node.ins, node.ins[::-1]):
            low, high = graph.ranges[one]
            if low >= 0 and high <= 1 and graph.avals[one].ndim > 1 and known.is_made(one):
                product = arrays.product(other)
                if product and len(arrays.read(product)) == 1:
                    yield product


def _factors(arrays: Arrays, values: Iterable[int], of: int | None = None) -> Iterator[Node]:
    """Yield the products that made values, one of the other, and read one array if it is said.

    All that makes a matrix which is solved or inverted on the way is among them.
    """
    seen, of_matrix = {arrays.origins[v] for v in values}, set[int]()
    pending = [*seen]
    for value in pending:
        node, read = arrays.makers.get(value), arrays.linear.get(value, _NONE)
        if node is None:
            continue
        is_part = node.role is Role.FIXED or value in of_matrix
        is_read = read and (of is None or arrays.is_linear(value, (of,), sums=True))
        if is_part:
            of_matrix |= arrays.read(node)
        more = read.union(*map(arrays.scales, node.ins)) if is_read or is_part else _NONE
        if is_part or of is not None:
            more |= arrays.added.get(value, _NONE)
        if of is not None:
            more = {v for v in more if v > of or v in arrays.carried}
        pending += more - seen
        seen |= more
        if node.multiplies and (is_read or is_part):
            yield node


class _Balanced:
    """Matrices of differences: most of their rows add up to nothing."""

    def __init__(self, arrays: Arrays, known: KnownValues) -> None:
        self._arrays, self._known = arrays, known
        self._less = _less_than_diagonal(arrays, known)
        self._found: dict[int, bool] = {}

    def has(self, value: int) -> bool:
        """Return whether a value is such a matrix, moved or scaled."""
        origin = self._arrays.origins[value]
        whole = itertools.takewhile(lambda p: p[0].name != "select_n", self._arrays.path(value))
        parts = itertools.chain((value,), (source for _, source in whole))
        known = [v for v in parts if self._known.has(v)] if self._known.has(origin) else []
        return any(map(self._adds_up, {*known[:1], *known[-1:]})) if known else origin in self._less

    def weighs(self, node: Node) -> bool:
        """Return whether a node multiplies by such a matrix, or sums under weights that cancel."""
        return any(map(self.has, node.ins)) or (
            node.multiplies and any(map(self._nearly_adds_up, node.ins))
        )

    def _nearly_adds_up(self, value: int) -> bool:
        if not (self._has_both_signs(value) and self._known.has(value)):
            return False
        numbers = self._known.whole(value)
        return bool(abs(numbers.sum(dtype=float)) * _CANCELS < np.abs(numbers).sum(dtype=float))

    def _adds_up(self, value: int) -> bool:
        if self._has_both_signs(value) and value not in self._found:
            self._found[value] = _is_balanced(self._known.whole(value))
        return self._found.get(value, False)

    def _has_both_signs(self, value: int) -> bool:
        low, high = self._arrays.graph.ranges[value]
        return low < 0 < high


def _is_balanced(numbers: np.ndarray) -> bool:
    """Return whether numbers, or most rows of a matrix, add up to nothing, but for roundings.

    Rows at the border of differences lack a neighbour.
    """
    largest = np.abs(numbers).max(initial=0.0)
    if not 0 < largest < np.inf:
        return False
    if abs(numbers.sum(dtype=float)) <= largest * _ROUNDING * numbers.size:
        return True

    def share(axis: int) -> float:
        sums = np.abs(numbers.sum(axis, dtype=float)[numbers.any(axis)])
        return float(np.mean(sums <= largest * _ROUNDING * numbers.shape[axis]))

    return numbers.ndim == 2 and max(share(0), share(1)) > 0.5


def _less_than_diagonal(arrays: Arrays, known: KnownValues) -> set[int]:
    """Return the matrices that are a diagonal one, made in the program, less something else.

    So is a matrix that selects rows, less another one. A small multiple of the identity damps.
    """
    graph, found, selected = arrays.graph, set[int](), set[int]()
    for node in graph.named.get("eq", ()):
        places = [_places(arrays, v) for v in node.ins]
        if 1 not in places and sum(places) != 2:
            continue
        for value in descendants(graph, node.outs[0], lambda n: _keeps_zeros(graph, n)):
            selected.add(value)
            less = [n for n in graph.readers[value] if n.name == "sub"]
            is_small = known.is_made(value) and max(map(abs, graph.ranges[value])) < 1
            if sum(places) == 2 and not is_small:  # `1 - eye(n)` is a mask
                found.update(n.outs[0] for n in less if n.ins[0] not in graph.constants)
    differences = graph.named.get("sub", ())
    return found.union(n.outs[0] for n in differences if selected.issuperset(n.ins))


def _places(arrays: Arrays, value: int) -> float:
    """Return of how many arrays of indices a value is a sum or a difference; NaN if of others."""
    if value in arrays.graph.constants:
        return 0
    node = arrays.makers.get(arrays.graph.origin(value))
    if node is None or node.name not in ("iota", "add", "sub", "abs"):
        return math.nan
    return sum(_places(arrays, v) for v in node.ins) if node.ins else 1


def _keeps_zeros(graph: Graph, node: Node) -> bool:
    """Return whether a node keeps the zeros of a matrix."""
    is_chosen = node.name == "select_n" and graph.constants.get(node.ins[1]) == 0
    is_kept = node.role in (Role.MOVE, Role.CONVERT) or node.link is Link.INVARIANT
    return is_chosen or is_kept or node.name == "mul"
