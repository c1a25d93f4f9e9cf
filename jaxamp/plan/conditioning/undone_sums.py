"""Find sums from which one of their terms is subtracted later: what is left has their rounding.

A reversible network computes its activations anew from its end, `x = y - f(z)` of `y = x + f(z)`,
and `y` was made of sums before. So does what has been adapted, less what it began with.
"""

from __future__ import annotations

from jaxamp.plan.graph.consumers import SCALES, closure, read_for_results
from jaxamp.plan.graph.graph import Graph, Node, Role

_Terms = frozenset[int]
_NONE: _Terms = frozenset()


def find_undone(graph: Graph) -> None:
    """Enter such sums, and what they are sums and multiples of."""
    given, added = graph.sources | graph.activations, dict[int, list[int]]()
    # Boundary values, and `~w` for a product with the weights `w`.
    terms = {v: frozenset({v}) for v in given if graph.is_float32[v]}
    for node in graph.nodes if "sub" in graph.named else ():
        is_product, is_sum = node.role is Role.CONTRACT, _adds_up(graph, node)
        for out, read in read_for_results(node) if is_product or is_sum else ():
            found = [terms.get(v, _NONE) for v in read]
            if is_sum:
                terms[out] = _NONE.union(*found)
                added.setdefault(out, []).extend(read)
            else:
                terms[out] = frozenset(~v for one in found if len(one) == 1 for v in one if v >= 0)
    subtractions = (n.ins for n in graph.named.get("sub", ()))
    undone = (ins for ins in subtractions if _undoes(*(terms.get(v, _NONE) for v in ins)))
    graph.undone.update(closure((v for ins in undone for v in ins), lambda v: added.get(v, ())))


def _undoes(one: _Terms, other: _Terms) -> bool:
    """Return whether a sum has all terms of another, or any if one of them has no product."""
    is_made = all(any(v < 0 for v in terms) for terms in (one, other))
    return _NONE < other < one if is_made else not one.isdisjoint(other)


def _adds_up(graph: Graph, node: Node) -> bool:
    """Return whether a result is a sum, a choice or a known multiple of what a node reads."""
    if node.role is not Role.ELEMENTWISE:
        return node.role in (Role.LINK, Role.MERGE, Role.MOVE)
    others = [v for v in node.ins if v not in graph.constants]
    return all(map(node.is_linear_in, others)) and (len(others) == 1 or node.name not in SCALES)
