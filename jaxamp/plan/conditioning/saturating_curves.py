"""Curves that saturate, and whose distance to a bound a later kernel needs.

`1 - y * y` of a rounded `y` is zero where `tanh` saturates; of its rounded argument it is not.
"""

from __future__ import annotations

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.regions import FusionRegions
from jaxamp.plan.graph.graph import Graph, Node, Role


def feeds_later_derivative(graph: Graph, regions: FusionRegions, node: Node, value: int) -> bool:
    """Whether a node makes a curve whose distance to its bound a later kernel needs."""
    if node.trait is not Trait.SMOOTH:
        return False
    squares = [out for r in graph.readers[value] if _squares(r) for out in r.outs]
    pending = [
        r for v in (value, *squares) for r in graph.readers[v] if _subtracts_from_bound(graph, r)
    ]
    seen = set(pending)
    for made in pending:  # the distance, and its products
        for out in made.outs:
            for reader in graph.readers[out]:
                if regions.is_far(out, reader):
                    if reader.role is not Role.LINK:
                        return True
                elif reader.name == "mul" and reader not in seen:
                    seen.add(reader)
                    pending.append(reader)
    return any(regions.is_far(v, r) for r in pending for v in r.ins if v == value)


def _squares(node: Node) -> bool:
    return node.name in ("square", "integer_pow") or (node.name == "mul" and len({*node.ins}) == 1)


def _subtracts_from_bound(graph: Graph, node: Node) -> bool:
    return node.name == "one_minus_square" or (
        node.name == "sub" and bool(graph.constants.get(node.ins[0]))
    )
