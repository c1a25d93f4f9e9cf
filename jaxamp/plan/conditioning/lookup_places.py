"""Find activations that say where to look something up: `table[floor(c)]`, `jnp.interp`, warps.

A rounded coordinate is another place, and what is made of it beside the place, to weigh neighbours
by, no longer belongs to the place. The index of a largest element is no place: what it is chosen
among has an order, and no coordinate.
"""

from __future__ import annotations

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.graph.graph import Graph, Role
from jaxamp.plan.graph.sweeps import backward, union


def find_lookup_places(graph: Graph) -> frozenset[int]:
    """Return float values from which indices of gathers, scatters and slices are computed.

    The search ends at products, whose operands are rounded as the policy says, and at choices.
    """
    lookups = {n for n in graph.nodes if n.role is Role.MOVE and len(n.ins) > 1}
    if not lookups:
        return frozenset()
    bits = bytearray(len(graph.avals))
    for node in backward(graph, bits):
        if node in lookups:
            for value in node.ins[1:]:
                bits[value] |= graph.kinds[value] in "iu" and value not in graph.constants
        if node.role is Role.CONTRACT or node.trait is Trait.EXTREMUM:
            continue
        if union(bits, node.outs):
            for value in node.ins:
                bits[value] = 1
    return frozenset(v for v, bit in enumerate(bits) if bit and graph.is_float32[v])
