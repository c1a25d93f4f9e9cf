"""Find products that are subtracted from what they multiply: what remains may be small.

`x - (x @ q) @ q.T` leaves what a subspace does not hold, `x - weights @ x` distances from a mean, a
Laplacian `degree * x - a @ x` those of neighbours. The matrix may be formed before: `eye(n) - 1/n`,
`diag(degree) - a`, a band of differences, or captured weights that add up to nothing. A Schur
complement, as the variance of a Gaussian process, is what remains of `c` in
`c - k.T @ solve(a, k)`, or of its diagonal in `c - sum(k * solve(a, k), 0)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from jaxamp.jaxprs.name_stack import is_backward
from jaxamp.plan.conditioning.squares import Squares, is_square, multiplies
from jaxamp.plan.graph.consumers import descendants
from jaxamp.plan.graph.graph import Graph, Link, Node, Role

_JOINS = ("add", "select_n", "scatter")
_SOLVERS = ("custom_linear_solve", "linear_solve", "triangular_solve")


def find_remainders(
    graph: Graph, products: Iterable[Node], squares: Squares
) -> dict[Node, Sequence[int]]:
    """Return the products that are subtracted from what they multiply, each with arrays of that."""
    found, differences = dict[Node, Sequence[int]](), set[int]()
    balanced = graph.balanced | _less_than_diagonal(graph, squares)
    for node in products if balanced else ():
        read = {squares.origins[v] for v in node.ins}
        # A form, `x.T @ (laplacian @ x)`, is a sum of differences by what these are of.
        forms = [v for v in read & differences if squares.is_linear(v, read)]
        if forms or not balanced.isdisjoint(read):
            found.update(dict.fromkeys((node, *_made_by(squares, node.ins)), node.ins))
            differences.update(node.outs)
    solved = {out for name in _SOLVERS for n in graph.named.get(name, ()) for out in n.outs}
    for node in graph.named.get("sub", ()):
        arrays = [squares.origins[v] for v in node.ins]
        for one, other in (arrays, arrays[::-1]) if not is_backward(node.scope) else ():
            if squares.is_linear(other, (one,)):
                found.update(dict.fromkeys(_made_by(squares, (other,), of=one), (one,)))
            elif read := _multiplied(squares, other, solved):
                # Products that a solver reads are float32 whatever their share, and so are these.
                found.update(dict.fromkeys(_made_by(squares, (*arrays, *read)), ()))
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
    return read if all(by_solver) or (any(by_solver) and is_form) else ()


def _made_by(squares: Squares, values: Iterable[int], of: int | None = None) -> Iterator[Node]:
    """Yield the products that made values, one of the other, and read one array if it is said.

    All that makes a matrix which is solved or inverted on the way is among them.
    """
    pending, of_matrix = [squares.origins[v] for v in values], set[int]()
    seen = {*pending}
    for value in pending:
        node, is_linear = squares.makers.get(value), value in squares.linear
        if node is None:
            continue
        is_read = is_linear and (of is None or squares.is_linear(value, (of,)))
        if not (is_read or node.role is Role.FIXED or value in of_matrix):
            continue
        read = {squares.origins[v] for v in node.ins}
        if node.role is Role.FIXED or value in of_matrix:
            of_matrix |= read
        if is_linear or node.name == "add":
            pending += read - seen
            seen |= read
        if multiplies(node):
            yield node


def _less_than_diagonal(graph: Graph, squares: Squares) -> set[int]:
    """Return the matrices that are a diagonal one, made in the program, less something else.

    So are bands of known numbers of both signs: `eye(n, k=1) + eye(n, k=-1) - 2 * eye(n)`.
    """
    found = set[int]()
    known = graph.constants
    for node in (*graph.named.get("eq", ()), *graph.named.get("scatter", ())):
        # The elements of a scatter's result are numbers of the first operand, and of the last.
        is_band = node.name == "scatter" and known.keys() >= {*node.ins[::2]}
        if is_band or sum(_places(graph, squares, v) for v in node.ins) == 2:
            for value in descendants(graph, node.outs[0], lambda n: _keeps_band(graph, n)):
                less = [n for n in graph.readers[value] if n.name == "sub"]
                # `1 - eye(n)` is a mask.
                found.update(n.outs[0] for n in less if n.ins[0] not in known)
                low, high = graph.ranges[value]
                if squares.makers[value].name in _JOINS and low < 0 < high:
                    found.add(squares.origins[value])
    return found


def _places(graph: Graph, squares: Squares, value: int) -> float:
    """Return of how many arrays of indices a value is a sum or a difference; NaN if of others."""
    node = squares.makers.get(graph.origin(value))
    if value in graph.constants:
        return 0
    if node is None or node.name not in ("iota", "add", "sub", "abs"):
        return math.nan
    return sum(_places(graph, squares, v) for v in node.ins) if node.ins else 1


def _keeps_band(graph: Graph, node: Node) -> bool:
    """Return whether a node keeps the zeros of a matrix, or joins it to known numbers."""
    if node.name in _JOINS and all(map(math.isfinite, graph.ranges[node.outs[0]])):
        return True
    is_chosen = node.name == "select_n" and graph.constants.get(node.ins[1]) == 0
    is_kept = node.role in (Role.MOVE, Role.CONVERT) or node.link is Link.INVARIANT
    return is_chosen or is_kept or node.name == "mul"
