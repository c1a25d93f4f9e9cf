"""Values that are weighed over and over, as cotangents are behind a fold by `logaddexp`.

Each turn or level multiplies them by exponentials of differences, and adds them to others. What is
made of all that nearly cancels: to add a number to all logarithms changes no weight. A few
roundings are like those of layers; with many the remainder is less than they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.conditioning.unrolled_recurrences import is_linear
from jaxamp.plan.dataflow.provenance import Facts
from jaxamp.plan.graph.graph import Graph, Node, Role, movements

_TIMES = 3  # fewer are like layers


def find_weighed(graph: Graph, facts: Facts) -> list[int]:
    """Values on a way of many weighings that are weighed again or added up by a prefix sum.

    And the weights there: those of one turn add up to one, and rounded they do not.
    """
    weights = _find_weights(graph, facts)
    if len(weights) < _TIMES:
        return []
    times = [0] * len(graph.avals)  # weighings on the longest way to a value
    for node in graph.nodes:
        for source, out in _linear(node, weights):
            times[out] = max(times[out], times[source] + _weighs(node, weights))
    again = bytearray(len(graph.avals))
    for node in reversed(graph.nodes):
        is_last = not (_weighs(node, weights) or node.trait is Trait.PREFIX)
        for source, out in _linear(node, weights):
            times[source] = max(times[source], times[out])
            again[source] |= again[out] or not is_last
    found = {v for v, most in enumerate(times) if most >= _TIMES and again[v] and facts.dense[v]}
    weighing = (node for v in found for node in graph.uses[v] if _weighs(node, weights))
    return [*found, *(v for node in weighing for v in node.ins if v in weights)]


def _find_weights(graph: Graph, facts: Facts) -> set[int]:
    """Exponentials of the difference of two activations."""
    differences = graph.named.get("sub", ())
    apart = {node.outs[0] for node in differences if all(facts.dense[v] for v in node.ins)}
    return {node.outs[0] for node in graph.named.get("exp", ()) if node.ins[0] in apart}


def _weighs(node: Node, weights: Set[int]) -> bool:
    return node.name == "mul" and not weights.isdisjoint(node.ins)


def _linear(node: Node, weights: Set[int]) -> Iterable[tuple[int, int]]:
    """Pairs of an operand and what is made of it by movement, sums and products with others."""
    if node.role is Role.MOVE:
        return movements(node)
    if node.role is Role.LINK:
        return ()
    sums = node.role is Role.MERGE or node.name in ("add_any", "cumsum")
    linear = [v for v in node.ins if v not in weights and (sums or is_linear(node, v))]
    return [(v, node.outs[0]) for v in linear]
