"""Find cotangents that are weighted many times, as those behind a scan of `logaddexp` are.

Each step multiplies them by exponentials of differences and adds them to others. The sum nearly
cancels, as adding a constant to all logarithms changes no weight. A few roundings are like those of
layers; after many, the remainder is smaller than they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.conditioning.unrolled_recurrences import is_linear
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.graph import Graph, Node, Role, movements

_MANY = 3  # weighted fewer times, values round as in a network of few layers


def find_log_space_weights(graph: Graph, provenance: Provenance) -> list[int]:
    """Return values weighted many times that are weighted again or enter a prefix sum.

    The weights of those are returned too: of one step they add up to one, and rounded they do not.
    """
    weights = _find_weights(graph, provenance)
    if len(weights) < _MANY:
        return []
    applications = [0] * len(graph.avals)  # on the longest path to each value
    for node in graph.nodes:
        for source, out in _linear(node, weights):
            applications[out] = max(
                applications[out], applications[source] + _applies_weight(node, weights)
            )
    again = bytearray(len(graph.avals))
    for node in reversed(graph.nodes):
        is_last = not (_applies_weight(node, weights) or node.trait is Trait.PREFIX)
        for source, out in _linear(node, weights):
            applications[source] = max(applications[source], applications[out])
            again[source] |= again[out] or not is_last
    found = {
        v
        for v, most in enumerate(applications)
        if most >= _MANY and again[v] and provenance.dense[v]
    }
    applying = (node for v in found for node in graph.readers[v] if _applies_weight(node, weights))
    return [*found, *(v for node in applying for v in node.ins if v in weights)]


def _find_weights(graph: Graph, provenance: Provenance) -> set[int]:
    """Return exponentials of the difference of two activations."""
    differences = graph.named.get("sub", ())
    apart = {node.outs[0] for node in differences if all(provenance.dense[v] for v in node.ins)}
    return {node.outs[0] for node in graph.named.get("exp", ()) if node.ins[0] in apart}


def _applies_weight(node: Node, weights: Set[int]) -> bool:
    return node.name == "mul" and not weights.isdisjoint(node.ins)


def _linear(node: Node, weights: Set[int]) -> Iterable[tuple[int, int]]:
    """Return pairs of an operand and a result that is linear in it: moved, added or scaled."""
    if node.role is Role.MOVE:
        return movements(node)
    if node.role is Role.LINK:
        return ()
    sums = node.role is Role.MERGE or node.name in ("add_any", "cumsum")
    linear = [v for v in node.ins if v not in weights and (sums or is_linear(node, v))]
    return [(v, node.outs[0]) for v in linear]
