"""Find products that are subtracted from what they multiply: what remains may be small.

`x - (x @ q) @ q.T` leaves what a subspace does not hold, `x - weights @ x` distances from a mean, a
Laplacian `degree * x - a @ x` those of neighbours. The matrix may be formed before: `eye(n) - 1/n`,
`diag(degree) - a`, or whatever known numbers add up to nothing in most rows. A Schur complement, as
the variance of a Gaussian process, is what remains of `c` in `c - k.T @ solve(a, k)`, or of its
diagonal in `c - sum(k * solve(a, k), 0)`. A solution leaves `b - a @ x`, whatever is added to `x`.
Two products of one array are as alike, such as means or selected rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxamp.plan.conditioning.squares import Squares, is_square, multiplies
from jaxamp.plan.dataflow.known_values import KnownValues
from jaxamp.plan.graph.consumers import descendants
from jaxamp.plan.graph.graph import Graph, Link, Node, Role

_EMPTY: frozenset[int] = frozenset()
_ROUNDING = 2.0**-24
_SOLVERS = ("custom_linear_solve", "linear_solve", "triangular_solve")


def find_remainders(
    graph: Graph, products: Iterable[Node], squares: Squares, known: KnownValues
) -> dict[Node, Sequence[int]]:
    """Return the products that are subtracted from what they multiply, each with arrays of that."""
    found, differences = dict[Node, Sequence[int]](), set[int]()
    balanced = _Balanced(graph, squares, known)
    for node in products:
        read = squares.read(node)
        # A form, `x.T @ (laplacian @ x)`, is a sum of differences by what these are of.
        forms = [v for v in read & differences if squares.is_linear(v, read)]
        if forms or any(map(balanced.has, node.ins)):
            found.update(dict.fromkeys((node, *_made_by(squares, node.ins)), node.ins))
            differences.update(node.outs)
    solved = {out for name in _SOLVERS for n in graph.named.get(name, ()) for out in n.outs}
    walked: dict[int, set[int]] = {}
    for one, other in squares.differences():
        if solved and (read := _multiplied(squares, other, solved)):
            # Products that a solver reads are float32 whatever their share, and so are these.
            found.update(dict.fromkeys(_made_by(squares, (one, other, *read)), ()))
        elif other not in squares.linear:
            continue
        elif squares.is_linear(other, (one,)) or _is_residual(squares, other, of=one):
            before = walked.setdefault(one, {one})
            found.update(dict.fromkeys(_made_by(squares, (other,), one, before), (one,)))
        else:
            found.update((node, node.ins) for node in _alike(squares, known, one, other))
    found.update((node, node.ins) for node in _orthogonal(graph, squares, known))
    return {node: found[node] for node in products if node in found}


def _multiplied(squares: Squares, value: int, solved: set[int]) -> Sequence[int]:
    """Return what is multiplied in `k.T @ solve(a, k)` or `sum(v**2)` of a solved `v`, if it is."""
    node = squares.makers.get(value)
    if node is None or not (multiplies(node) or node.name == "mul" or is_square(node)):
        return ()
    read = [squares.origins[v] for v in node.ins]
    by_solver = [v in solved or squares.is_linear(v, solved) for v in read]
    one, other = read[0], read[-1]
    is_form = squares.is_linear(one, (other,)) or squares.is_linear(other, (one,))
    is_found = any(by_solver) if is_form or multiplies(node) else all(by_solver)
    return read if is_found else ()


def _is_residual(squares: Squares, value: int, of: int) -> bool:
    """Return whether a value is `a @ x` of a solution `x`, which `a` and the array made."""
    node = squares.makers.get(value)
    if node is None or not multiplies(node):
        return False
    read = [squares.origins[v] for v in node.ins[:2]]
    return any(
        squares.is_linear(x, (of,), sums=True) and squares.is_linear(x, (a,), sums=True)
        for x, a in (read, read[::-1])
    )


def _alike(squares: Squares, known: KnownValues, one: int, other: int) -> Sequence[Node]:
    """Return two products of one array by masks, by known numbers or by arrays made of each other.

    Or one by known numbers, of which parts are subtracted.
    """
    nodes = [n for v in (one, other) if (n := squares.makers.get(v)) and multiplies(n)]
    by_known = [not known.made.isdisjoint(n.ins) for n in nodes]
    if one == other or len(nodes) < 2:
        return nodes[:1] if one == other and any(by_known) else ()
    arrays = squares.origins if all(by_known) else squares.whole
    for first, second in itertools.product(*((n.ins[:2], n.ins[1::-1]) for n in nodes)):
        if arrays[first[1]] == arrays[second[1]]:
            pair = squares.origins[first[0]], squares.origins[second[0]]
            of_numbers = all(by_known) or all(map(squares.is_mask, pair))
            if of_numbers or _are_of_one(squares, *pair):
                return nodes
    return ()


def _are_of_one(squares: Squares, one: int, other: int) -> bool:
    """Return whether sums and products make one array of the other."""
    pairs = (one, other), (other, one)
    return one == other or any(squares.is_linear(v, (of,), sums=True) for v, of in pairs)


def _orthogonal(graph: Graph, squares: Squares, known: KnownValues) -> Iterator[Node]:
    """Yield the products of an array with itself beside an identity matrix: `q.T @ q - eye(n)`."""
    for node in graph.named.get("sub", ()):
        for one, other in (node.ins, node.ins[::-1]):
            is_matrix = one in known.made and graph.avals[one].ndim > 1
            if is_matrix and graph.ranges[one].low >= 0 and graph.ranges[one].high <= 1:
                product = squares.makers.get(squares.origins[other])
                if product and multiplies(product) and len(squares.read(product)) == 1:
                    yield product


def _made_by(
    squares: Squares, values: Iterable[int], of: int | None = None, seen: set[int] | None = None
) -> Iterator[Node]:
    """Yield the products that made values, one of the other, and read one array if it is said.

    All that makes a matrix which is solved or inverted on the way is among them. What has been
    seen before is left out.
    """
    seen = set() if seen is None else seen
    pending, of_matrix = [o for v in values if (o := squares.origins[v]) not in seen], set[int]()
    seen.update(pending)
    for value in pending:
        node, read = squares.makers.get(value), squares.linear.get(value, _EMPTY)
        if node is None:
            continue
        is_read = read and (of is None or squares.is_linear(value, (of,), sums=True))
        is_part = node.role is Role.FIXED or value in of_matrix
        if is_part:
            of_matrix |= squares.read(node)
        more = read.union(*map(squares.scales, node.ins)) if is_read or is_part else _EMPTY
        if is_part or of is not None:
            more |= squares.added.get(value, _EMPTY)
        if of is not None:
            more = more.union(squares.carried.get(value, ()))
            more = {v for v in more if v > of or v in squares.carried}
        pending += more - seen
        seen |= more
        if multiplies(node) and (is_read or is_part):
            yield node


class _Balanced:
    """Matrices of differences: most of their rows add up to nothing."""

    def __init__(self, graph: Graph, squares: Squares, known: KnownValues) -> None:
        self._graph, self._squares, self._known = graph, squares, known
        self._less = _less_than_diagonal(graph, squares)
        self._found: dict[int, bool] = {}

    def has(self, value: int) -> bool:
        """Return whether a value is such a matrix, moved or scaled."""
        origin = self._squares.origins[value]
        whole = itertools.takewhile(lambda p: p[0].name != "select_n", self._squares.path(value))
        parts = (value, *(source for _, source in whole))
        known = [v for v in parts if v in self._known]
        return origin in self._less or any(map(self._adds_up, {*known[:1], *known[-1:]}))

    def _adds_up(self, value: int) -> bool:
        low, high = self._graph.ranges[value]
        if value not in self._known or not low < 0 < high:
            return False
        if value not in self._found:
            self._found[value] = _is_balanced(self._known.whole(value))
        return self._found[value]


def _is_balanced(numbers: np.ndarray) -> bool:
    """Return whether numbers, or most rows of a matrix, add up to nothing, but for roundings.

    Rows at the border of differences lack a neighbour.
    """
    largest = np.abs(numbers).max(initial=0.0)
    if not 0 < largest < np.inf:
        return False
    if abs(numbers.sum(dtype=float)) <= largest * _ROUNDING:
        return True

    def share(axis: int) -> float:
        sums = np.abs(numbers.sum(axis, dtype=float)[numbers.any(axis)])
        return float(np.mean(sums <= largest * _ROUNDING * numbers.shape[axis]))

    return numbers.ndim == 2 and max(share(0), share(1)) > 0.5


def _less_than_diagonal(graph: Graph, squares: Squares) -> set[int]:
    """Return the matrices that are a diagonal one, made in the program, less something else.

    So is a matrix that selects rows, less another one.
    """
    found, selected = set[int](), set[int]()
    for node in graph.named.get("eq", ()):
        places = [_places(graph, squares, v) for v in node.ins]
        if 1 not in places and sum(places) != 2:
            continue
        for value in descendants(graph, node.outs[0], lambda n: _keeps_zeros(graph, n)):
            selected.add(value)
            less = [n for n in graph.readers[value] if n.name == "sub"]
            if sum(places) == 2:  # `1 - eye(n)` is a mask
                found.update(n.outs[0] for n in less if n.ins[0] not in graph.constants)
    differences = graph.named.get("sub", ())
    return found.union(n.outs[0] for n in differences if selected.issuperset(n.ins))


def _places(graph: Graph, squares: Squares, value: int) -> float:
    """Return of how many arrays of indices a value is a sum or a difference; NaN if of others."""
    node = squares.makers.get(graph.origin(value))
    if value in graph.constants:
        return 0
    if node is None or node.name not in ("iota", "add", "sub", "abs"):
        return math.nan
    return sum(_places(graph, squares, v) for v in node.ins) if node.ins else 1


def _keeps_zeros(graph: Graph, node: Node) -> bool:
    """Return whether a node keeps the zeros of a matrix."""
    is_chosen = node.name == "select_n" and graph.constants.get(node.ins[1]) == 0
    is_kept = node.role in (Role.MOVE, Role.CONVERT) or node.link is Link.INVARIANT
    return is_chosen or is_kept or node.name == "mul"
