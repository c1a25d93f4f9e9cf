"""Find products that lose their meaning where operands are rounded: cancelled ones, and residues.

Products of a backward pass that multiply the cotangent of such a product are no better conditioned.
"""

from __future__ import annotations

from jaxamp.cancellation.arrays import Arrays
from jaxamp.cancellation.residues import find_residues
from jaxamp.cancellation.solver_steps import find_factored, find_solved, find_solver_steps
from jaxamp.cancellation.squares import Squares, find_cancelled, find_transposed
from jaxamp.plan.dataflow.constraints import Constraint
from jaxamp.plan.dataflow.known_values import KnownValues
from jaxamp.plan.graph.graph import Graph, Node


def find_cancelled_products(graph: Graph, known: KnownValues) -> dict[Node, Constraint]:
    """Return products of a program that are not to be rounded, with the reason."""
    products = [n for n in graph.products if len(n.ins) > 1]
    arrays = Arrays(graph)
    squares = Squares(arrays)
    cancelled = find_cancelled(squares)
    found = find_residues(arrays, products, squares, cancelled, known) | cancelled
    # These are known later, by what reads them and what they read; not their transposes.
    solving = find_factored(graph, products) | find_solved(arrays, products)
    found |= find_transposed(arrays, solving | found, products)
    return find_solver_steps(graph, products) | found
