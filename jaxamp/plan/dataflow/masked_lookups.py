"""Find rows that were looked up and masked: of a table split over devices, each has its own rows.

Devices then add up one row and zeros, a sum that rounds the row and nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxamp.core.intervals import magnitude
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.lookups import is_lookup
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.graph import Graph, Node, Role, movements


def find_masked_lookups(graph: Graph, provenance: Provenance) -> frozenset[int]:
    """Return the values that are rows of a boundary value, or zeros where a mask says so.

    Empty where nothing is added up over devices.
    """
    if not any(node.trait is Trait.ALLREDUCE for node in graph.nodes):
        return frozenset()
    rows, masked = set[int](), set[int]()
    for node in graph.nodes:
        if is_lookup(graph, provenance, node):
            rows.update(node.outs)
            masked.update(node.outs if node.eqn.params["fill_value"] == 0 else ())
        elif node.role is Role.MOVE:
            for found in (rows, masked):
                found.update([out for source, out in movements(node) if source in found])
        elif not rows.isdisjoint(_masked(graph, node)):
            rows.update(node.outs)
            masked.update(node.outs)
    return frozenset(masked)


def _masked(graph: Graph, node: Node) -> Iterator[int]:
    """Yield the operand of which a node leaves what a mask says, and zeros elsewhere."""
    if node.name == "select_n":
        kept = [v for v in node.ins[1:] if graph.constants.get(v) != 0]
        yield from kept if len(kept) == 1 else ()
    elif node.name == "mul":
        for value, mask in (node.ins, node.ins[::-1]):
            if graph.whole[mask] and magnitude(graph.ranges[mask]).high <= 1:
                yield value
