"""Find products that lose their meaning where operands are rounded: cancelled ones, and residues.

Products of a backward pass that multiply the cotangent of such a product are no better conditioned.
"""

from __future__ import annotations

from jaxamp.jaxprs.name_stack import is_backward
from jaxamp.plan.conditioning.arrays import Arrays, multiplies
from jaxamp.plan.conditioning.residues import find_residues
from jaxamp.plan.conditioning.solver_steps import find_factored, find_solved, find_solver_steps
from jaxamp.plan.conditioning.squares import Squares, find_cancelled, find_transposed
from jaxamp.plan.dataflow.known_values import KnownValues
from jaxamp.plan.graph.consumers import closure
from jaxamp.plan.graph.graph import Graph


def find_precise_products(graph: Graph) -> None:
    """Enter products that are not to be rounded, what these read, and products of known numbers."""
    products = [n for n in graph.nodes if multiplies(n) and len(n.ins) > 1]
    arrays = Arrays(graph)
    squares = Squares(arrays)
    cancelled = find_cancelled(squares)
    known = KnownValues(graph)
    found = find_residues(arrays, products, squares, cancelled, known) | cancelled
    # These are known later, by what reads them and what they read; not their transposes.
    solving = find_factored(graph, products) | find_solved(arrays, products)
    found |= find_transposed(arrays, solving | found, products)
    graph.precise = find_solver_steps(graph, products) | found
    written = (n for n in products if all(map(known.is_made, n.ins)) and not is_backward(n.scope))
    graph.written.update(n.outs[0] for n in written)
    read, moved = (v for node in graph.precise for v in node.ins), graph.moved_from
    graph.unrounded.update(closure(read, lambda v: (moved[v],) if v in moved else ()))
