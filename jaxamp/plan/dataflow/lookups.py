"""Find lookups in tables, and the scatters that transpose them.

A lookup is a product of its table with one-hot rows. What it finds is an activation; what the
scatter adds up are cotangents of one, and what it returns is a gradient.
"""

from __future__ import annotations

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.graph import Graph, Node


def is_lookup(graph: Graph, provenance: Provenance, node: Node) -> bool:
    """Return whether a node gathers rows of a boundary value, by computed indices."""
    is_gather = node.name == "gather" and any(v not in graph.constants for v in node.ins[1:])
    return is_gather and not provenance.dense[node.ins[0]]


def find_looked_up(graph: Graph, provenance: Provenance) -> frozenset[int]:
    """Return the values that are computed from rows of a table."""
    found = set[int]()
    for node in graph.nodes:
        if is_lookup(graph, provenance, node) or not found.isdisjoint(node.ins):
            found.update(node.outs)
    return frozenset(found)


def find_transposed_lookups(graph: Graph, provenance: Provenance) -> frozenset[Node]:
    """Return the scatters that add cotangents of rows to zeros, by the indices of the lookup."""
    scatters = graph.named.get("scatter-add", ())
    if not scatters:
        return frozenset()
    gathers = graph.named.get("gather", ())
    places = {node.ins[1] for node in gathers if is_lookup(graph, provenance, node)}
    zeros = graph.constants
    return frozenset(n for n in scatters if n.ins[1] in places and zeros.get(n.ins[0]) == 0)
