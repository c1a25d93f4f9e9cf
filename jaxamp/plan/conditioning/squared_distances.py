"""Find arrays whose distances are computed from squares and products: `|a|² - 2ab + |b|²`.

The cotangent of `a` is a sum of differences `a - b`, computed in two parts. The part from the
squares and the part from the product nearly cancel, and both are rounded unless `a` is float32.
"""

from __future__ import annotations

from jaxamp.plan.graph.consumers import descendants, find_origins, find_parts, is_movement
from jaxamp.plan.graph.graph import Graph, Node, Role

_SQUARES = ("square", "integer_pow")
_SUMS = ("add", "sub")
_SCALES = ("mul", "div", "neg")


def find_squared_distances(graph: Graph) -> set[int]:
    """Return activations whose squared norms are added to their products, moved and scaled too."""
    if not _adds_squares(graph):
        return set()

    def is_scaled(node: Node) -> bool:
        return node.name in _SCALES and sum(v not in graph.constants for v in node.ins) == 1

    def passes(node: Node) -> bool:
        return node.name in _SUMS or is_scaled(node)

    origins = find_origins(graph, is_scaled)
    squares = find_parts(
        graph,
        lambda node: [origins.get(node.ins[0], node.ins[0])] if is_square(node) else None,
        lambda node: passes(node) or node.name == "reduce_sum",
    )
    products = find_parts(
        graph,
        lambda n: [origins.get(v, v) for v in n.ins] if n.role is Role.CONTRACT else None,
        passes,
    )
    sums = [out for node in graph.nodes if passes(node) for out in node.outs]
    both = [squares[v] & products[v] for v in sums if v in squares and v in products]
    found = set[int]().union(*both)
    return found | {v for v, source in origins.items() if source in found}


def _adds_squares(graph: Graph) -> bool:
    """Return whether a sum of squares is added to something directly, as neither mean nor norm."""
    named = graph.named
    made = (node for name in ("mul", *_SQUARES) for node in named.get(name, ()))
    squares = {node.outs[0] for node in made if is_square(node)}
    sums = (node.outs[0] for node in named.get("reduce_sum", ()) if node.ins[0] in squares)
    moved = (v for value in sums for v in descendants(graph, value, is_movement))
    return any(reader.name in _SUMS for v in moved for reader in graph.readers[v])


def is_square(node: Node) -> bool:
    """Return whether a node multiplies a value by itself."""
    if node.name == "mul":
        return node.ins[0] == node.ins[1]
    return node.name in _SQUARES and node.eqn.params.get("y", 2) == 2
