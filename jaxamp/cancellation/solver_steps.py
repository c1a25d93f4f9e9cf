"""Find products around solvers: of a step's residual, as in `x - solve(j, f(x))`, or of a solution.

A solution is as good as its right-hand side, which may be rounded like any other value. A step of
Newton's method, or Gauss's, is added to what its right-hand side was made from: steps end where the
residual is zero as it is computed, however exact each step is. A gradient that is solved for with a
matrix for one of its axes is none: it is preconditioned, as by Kronecker factors, and leads there.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxamp.cancellation.arrays import ADDED, Arrays
from jaxamp.core.guards import Guard
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.constraints import FACTORED, READS_SOLUTION, Constraint
from jaxamp.plan.graph.graph import Graph, Link, Node, Role
from jaxamp.plan.graph.sweeps import mark, union

STEP = Constraint("makes the residual of a solver's step", Guard.NO_KERNEL)

_SOLVERS = (Trait.SOLVER, Trait.LINALG)


def find_solver_steps(graph: Graph, products: Sequence[Node]) -> dict[Node, Constraint]:
    """Return the products between what a solution is added to and its right-hand side."""
    solves = [n for n in graph.nodes if n.trait in _SOLVERS and _has_one_side(graph, n)]
    if not solves:
        return {}
    # One bit for each solve: whether a value is its solution, possibly moved or scaled; whether it
    # is made of what a solution is added to; and whether the right-hand side is made of it.
    solution, made, needed = ([0] * len(graph.avals) for _ in range(3))
    for place, solve in enumerate(solves):
        solution[solve.outs[0]] = 1 << place
        needed[solve.ins[-1]] |= 1 << place
    for node in graph.nodes:
        found = union(solution, node.ins)
        if found and (node.is_elementwise or node.trait in _SOLVERS):
            mark(solution, node.outs, found)
        for value in node.ins if node.name in ("add", "sub") else ():
            made[value] |= found & ~solution[value]
    for node in graph.nodes:
        if node.link is not Link.BACK:
            mark(made, node.outs, union(made, node.ins))
    for node in reversed(graph.nodes):
        mark(needed, node.ins, union(needed, node.outs))
    return {n: STEP for n in products if union(made, n.ins) & needed[n.outs[0]]}


def find_solved(arrays: Arrays, products: Sequence[Node]) -> dict[Node, Constraint]:
    """Return the products that read a factor, points around it, or what a solver makes of one."""
    made = arrays.graph.factors.copy()
    for node in arrays.graph.nodes if made else ():
        read = arrays.read(node)
        is_sum = node.name in ADDED or node.role is Role.MERGE
        is_kept = is_sum and arrays.linear.keys().isdisjoint(read - made)
        if (is_kept or node.trait is Trait.SOLVER) and not made.isdisjoint(read):
            made.update(node.outs)
    return {node: READS_SOLUTION for node in products if not made.isdisjoint(arrays.read(node))}


def find_factored(graph: Graph, products: Sequence[Node]) -> dict[Node, Constraint]:
    """Return the products of which nearly singular matrices are made that are factored.

    They add up no more terms than they have rows. A solution lies where operands add up to little.
    """
    read = {v for n in graph.nodes if not graph.factors.isdisjoint(n.outs) for v in n.ins}
    for node in reversed(graph.nodes) if read else ():
        if node.role not in (Role.CONTRACT, Role.FIXED) and not read.isdisjoint(node.outs):
            read.update(node.ins)
    made = [node for node in products if node.outs[0] in read]
    return {n: FACTORED for n in made if graph.sizes[n.ins[0]] <= graph.sizes[n.outs[0]]}


def _has_one_side(graph: Graph, solve: Node) -> bool:
    """Return whether there is one right-hand side for each matrix."""
    *others, side = solve.ins
    matrices = (v for v in others if graph.kinds[v] == "f" and graph.avals[v].ndim > 1)
    return any(graph.sizes[v] == graph.sizes[side] * graph.avals[v].shape[-1] for v in matrices)
