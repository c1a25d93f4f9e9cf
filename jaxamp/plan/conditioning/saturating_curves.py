"""Find saturating curves whose derivative is computed from their result by a later kernel.

`1 - y * y` of a rounded `y = tanh(x)` is zero where the curve saturates. Computed again from the
rounded argument `x` it is not.
"""

from __future__ import annotations

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.regions import FusionRegions
from jaxamp.plan.graph.graph import Graph, Node, Role


def feeds_later_derivative(graph: Graph, regions: FusionRegions, node: Node, value: int) -> bool:
    """Return whether a later kernel reads the distance of a saturating curve to its bound."""
    if node.trait is not Trait.SMOOTH:
        return False
    squares = [out for r in graph.readers[value] if _squares(r) for out in r.outs]
    pending = [
        r for v in (value, *squares) for r in graph.readers[v] if _subtracts_from_bound(graph, r)
    ]
    seen = set(pending)
    for made in pending:  # the distance to the bound, and products with it
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
