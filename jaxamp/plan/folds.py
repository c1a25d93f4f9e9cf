"""Values that are combined with shifted parts of themselves: differences, prefix folds, powers.

`c[16:] - c[:-16]` of a running sum, pairwise differences, the products of decay factors that an
associative scan makes: there a rounding of the one value does not stay a rounding of the result.
"""

from __future__ import annotations

from jaxamp.plan.facts import Facts, movements
from jaxamp.plan.graph import Graph, Node, Role
from jaxamp.taxonomy import Trait


def find_folds(graph: Graph, facts: Facts) -> bytearray:
    """Marks what is combined with itself, and what comes of it by more of the same.

    A direct result of Compute is not marked: that it is rounded is what the policy asks for.
    """
    folded = bytearray(len(graph.avals))
    origin = list(range(len(graph.avals)))  # what a value was moved from
    computed = bytearray(len(graph.avals))
    for node in graph.nodes:
        if node.role is Role.MOVE:
            for source, out in movements(node):
                origin[out], folded[out] = origin[source], folded[source]
        elif node.role is Role.CONTRACT:
            for out in node.outs:
                computed[out] = 1
        elif node.role is Role.MERGE or node.trait is Trait.ROUNDED:
            _combine(graph, facts, node, origin, computed, folded)
    return folded


def _combine(
    graph: Graph,
    facts: Facts,
    node: Node,
    origin: list[int],
    computed: bytearray,
    folded: bytearray,
) -> None:
    parts = [v for v in dict.fromkeys(node.ins) if facts.dense[v]]
    if len(parts) < 2 and not (parts and node.role is Role.MERGE):
        return
    if all(folded[v] for v in parts):
        _mark(node.outs, folded)
    elif node.role is Role.ELEMENTWISE and len({origin[v] for v in parts}) == 1:
        _mark(node.outs, folded)
        _mark(parts, folded)
        if not computed[origin[parts[0]]]:
            folded[origin[parts[0]]] = 1


def _mark(values: list[int] | tuple[int, ...], flag: bytearray) -> None:
    for value in values:
        flag[value] = 1
