"""Find products that lose their meaning where operands are rounded: cancelled ones, and residues.

Products of a backward pass that multiply the cotangent of such a product are no better conditioned.
"""

from __future__ import annotations

from jaxamp.plan.conditioning.arrays import Arrays, multiplies
from jaxamp.plan.conditioning.residues import find_residues
from jaxamp.plan.conditioning.squares import Squares, find_cancelled, find_transposed
from jaxamp.plan.graph.consumers import closure
from jaxamp.plan.graph.graph import Graph


def find_precise_products(graph: Graph) -> None:
    """Enter into a graph its products that are not to be rounded, and what these read."""
    products = [n for n in graph.nodes if multiplies(n) and len(n.ins) > 1]
    arrays = Arrays(graph)
    squares = Squares(arrays)
    cancelled = find_cancelled(squares)
    found = find_residues(arrays, products, squares, cancelled) | cancelled
    found |= find_transposed(arrays, found, products)
    graph.precise = found
    read, moved = (v for node in found for v in node.ins), graph.moved_from
    graph.unrounded.update(closure(read, lambda v: (moved[v],) if v in moved else ()))
