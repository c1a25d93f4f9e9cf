"""Find arrays whose distances are computed from squares and products: `|a|² - 2ab + |b|²`.

The cotangent of `a` is a sum of differences `a - b`, computed in two parts. The part from the
squares and the part from the product nearly cancel, and both are rounded unless `a` is float32.
"""

from __future__ import annotations

from jaxamp.plan.graph.consumers import descendants, is_movement
from jaxamp.plan.graph.graph import Graph, Node, Role, movements

_Parts = dict[int, frozenset[int]]
_NONE: frozenset[int] = frozenset()
_SQUARES = ("square", "integer_pow")
_SUMS = ("add", "sub")
_SCALES = ("mul", "div", "neg")


def find_squared_distances(graph: Graph) -> set[int]:
    """Return activations whose squared norms are added to their products, moved and scaled too."""
    if not _adds_squares(graph):
        return set()
    origin: dict[int, int] = {}
    squares: _Parts = {}
    products: _Parts = {}
    found = set[int]()
    for node in graph.nodes:
        if node.role is Role.CONTRACT:
            products[node.outs[0]] = frozenset(origin.get(v, v) for v in node.ins)
        elif node.role is Role.MOVE:
            for source, out in movements(node):
                origin[out] = origin.get(source, source)
                _propagate(squares, source, out)
                _propagate(products, source, out)
        elif is_square(node) or node.name == "reduce_sum":
            source = node.ins[0]
            own = _NONE if node.name == "reduce_sum" else frozenset((origin.get(source, source),))
            squares[node.outs[0]] = squares.get(source, own)
        elif node.name in _SUMS or _is_scaled(graph, node):
            (out,) = node.outs
            for parts in (squares, products):
                parts[out] = _NONE.union(*(parts.get(v, _NONE) for v in node.ins))
            found |= squares[out] & products[out]
            if node.name in _SCALES:
                source = next(v for v in node.ins if v not in graph.constants)
                origin[out] = origin.get(source, source)
    return found | {v for v, source in origin.items() if source in found}


def _adds_squares(graph: Graph) -> bool:
    """Return whether a sum of squares is added to something directly, as neither mean nor norm."""
    named = graph.named
    made = (node for name in ("mul", *_SQUARES) for node in named.get(name, ()))
    squares = {node.outs[0] for node in made if is_square(node)}
    sums = (node.outs[0] for node in named.get("reduce_sum", ()) if node.ins[0] in squares)
    moved = (v for value in sums for v in descendants(graph, value, is_movement))
    return any(reader.name in _SUMS for v in moved for reader in graph.readers[v])


def _propagate(parts: _Parts, source: int, out: int) -> None:
    if source in parts:
        parts[out] = parts[source]


def is_square(node: Node) -> bool:
    """Return whether a node multiplies a value by itself."""
    if node.name == "mul":
        return node.ins[0] == node.ins[1]
    return node.name in _SQUARES and node.eqn.params.get("y", 2) == 2


def _is_scaled(graph: Graph, node: Node) -> bool:
    """Return whether a node multiplies one array by a known number."""
    return node.name in _SCALES and sum(v not in graph.constants for v in node.ins) == 1
