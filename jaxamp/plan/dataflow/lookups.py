"""Find lookups in tables, and the scatters that transpose them.

A lookup is a product of its table with one-hot rows. What it finds is an activation; what the
scatter adds up are cotangents of one, and what it returns is a gradient.
"""

from __future__ import annotations

import operator

from jaxamp.plan.dataflow.provenance import DENSE, STATISTIC, Provenance
from jaxamp.plan.graph.consumers import descendants
from jaxamp.plan.graph.graph import Graph, Node


def is_lookup(graph: Graph, provenance: Provenance, node: Node) -> bool:
    """Return whether a node gathers rows of a boundary value, by computed indices."""
    is_gather = node.name == "gather" and any(v not in graph.constants for v in node.ins[1:])
    return is_gather and not provenance.dense[node.ins[0]]


def find_split_lookups(
    graph: Graph, provenance: Provenance, *, if_unknown: bool
) -> dict[Node, bool]:
    """Return the lookups in tables whose rows lie on several devices, or may; whether they do.

    Each device finds its own rows, and all of them are added up. Under Explicit axes a lookup leads
    to Auto ones and back: the type that a table is resharded from says where its rows lie.

    Args:
      graph: the program.
      provenance: where each value comes from.
      if_unknown: whether tables count of which no type says anything, as under Auto axes; in a
        program that says how devices part its arrays, they do.
    """
    if_unknown = if_unknown or _is_partitioned(graph)
    before = {node.outs[0]: node.ins[0] for node in graph.named.get("reshard", ())}
    found: dict[Node, bool] = {}
    for node in graph.named.get("gather", ()):
        if is_lookup(graph, provenance, node):
            tables = [node.ins[0]]
            while tables[-1] in before:
                tables.append(before[tables[-1]])
            is_known = any(_has_axes(graph, table) for table in tables)
            is_split = any(_is_split(graph, node, t) for t in tables)
            if is_split or (if_unknown and not is_known):
                found[node] = is_split
    return found


def is_subtracted(graph: Graph, provenance: Provenance, value: int) -> bool:
    """Return whether a value is part of a difference before Compute, as of two points.

    The other part is no activation, whose rounding is as large, and no mean, as in a norm.
    """
    known = provenance.bits
    return any(
        reader.name == "sub" and not any(known[v] & (DENSE | STATISTIC) for v in reader.ins)
        for v in descendants(graph, value, operator.attrgetter("is_elementwise"))
        for reader in graph.readers[v]
    )


def _is_partitioned(graph: Graph) -> bool:
    """Return whether a program constrains in which parts an array lies on several devices."""
    constraints = graph.named.get("sharding_constraint", ())
    return any(node.eqn.params["sharding"].num_devices > 1 for node in constraints)


def _has_axes(graph: Graph, value: int) -> bool:
    """Return whether a value's type has axes of which it says whether they split it."""
    mesh = getattr(getattr(graph.avals[value], "sharding", None), "mesh", None)
    return mesh is not None and not (mesh.empty or mesh.are_all_axes_auto)


def _is_split(graph: Graph, node: Node, table: int) -> bool:
    sharding = getattr(graph.avals[table], "sharding", None)
    split = tuple(getattr(sharding, "spec", ()))
    axes = node.eqn.params["dimension_numbers"].start_index_map
    return any(split[axis] is not None for axis in axes if axis < len(split))


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
