"""Find products that make the residual of a solver's step, as in `x - solve(j, f(x))`.

A solution is as good as its right-hand side, which may be rounded like any other value. A step of
Newton's method, or Gauss's, is added to what its right-hand side was made from: steps end where the
residual is zero as it is computed, however exact each step is. A gradient that is solved for with a
matrix for one of its axes is none: it is preconditioned, as by Kronecker factors, and leads there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxamp.core.guards import Guard
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.constraints import Constraint
from jaxamp.plan.graph.consumers import descendants
from jaxamp.plan.graph.graph import Graph, Node

STEP = Constraint("makes the residual of a solver's step", Guard.NO_KERNEL)

_SOLVERS = (Trait.SOLVER, Trait.LINALG)


def find_solver_steps(graph: Graph, products: Sequence[Node]) -> dict[Node, Constraint]:
    """Return the products of such residuals, each with why."""
    solves = [n for n in graph.nodes if n.trait in _SOLVERS and _has_one_side(graph, n)]
    return {product: STEP for solve in solves for product in _residual(graph, solve, products)}


def _has_one_side(graph: Graph, solve: Node) -> bool:
    """Return whether there is one right-hand side for each matrix."""
    *others, side = solve.ins
    matrices = (v for v in others if graph.kinds[v] == "f" and graph.avals[v].ndim > 1)
    return any(graph.sizes[v] == graph.sizes[side] * graph.avals[v].shape[-1] for v in matrices)


def _residual(graph: Graph, solve: Node, products: Sequence[Node]) -> Iterator[Node]:
    """Yield the products between what a solution is added to and its right-hand side."""
    made, needed = {*_stepped(graph, solve)}, {solve.ins[-1]}
    before = graph.nodes[: solve.index] if made else []
    for node in before:
        if not made.isdisjoint(node.ins):
            made.update(node.outs)
    for node in reversed(before):
        if not needed.isdisjoint(node.outs):
            needed.update(node.ins)
    for product in products:
        is_before = product.index < solve.index and product.outs[0] in needed
        if is_before and not made.isdisjoint(product.ins):
            yield product


def _stepped(graph: Graph, solve: Node) -> Iterator[int]:
    """Yield the values to which a solution is added."""
    solution = descendants(graph, solve.outs[0], lambda n: n.is_elementwise or n.trait in _SOLVERS)
    for value in solution:
        for reader in graph.readers[value]:
            if reader.name in ("add", "sub"):
                yield from (v for v in reader.ins if v not in solution)
