"""Find products that lose their meaning where operands are rounded: cancelled ones, and residues.

Products of a backward pass that multiply the cotangent of such a product are no better conditioned.
"""

from __future__ import annotations

from jaxamp.plan.conditioning.residues import find_residues
from jaxamp.plan.conditioning.squares import Squares, find_cancelled, multiplies
from jaxamp.plan.graph.graph import Graph


def find_precise_products(graph: Graph) -> None:
    """Enter into a graph its products that are not to be rounded, and what these read."""
    products = [n for n in graph.nodes if multiplies(n) and len(n.ins) > 1]
    squares = Squares(graph)
    cancelled = find_cancelled(squares)
    found = find_residues(graph, products, squares, cancelled) | cancelled
    found |= squares.transposed(found, products)
    graph.precise = found
    for value in (v for node in found for v in node.ins):
        graph.unrounded.add(value)
        while value in graph.moved_from:
            value = graph.moved_from[value]
            graph.unrounded.add(value)
