"""Find values that a program returns: they are in memory in float32 whatever else reads them."""

from __future__ import annotations

from jaxamp.plan.graph.graph import Graph, Link, Role, movements

_WHOLE = (Link.STACK, Link.JOIN)  # a result is written by every iteration, or by either branch


def find_returned(graph: Graph) -> frozenset[int]:
    """Return the program's results, and what only moves, or leaves a loop or branch, to be one.

    Narrow results, and those that Compute outside reads, are not among them; nor is an array of
    which a part is returned.
    """
    returned = set(graph.outputs)
    for node in reversed(graph.nodes):
        if node.role is Role.MOVE:
            pairs = movements(node)
            returned.update(
                source
                for source, out in pairs
                if out in returned and graph.sizes[source] == graph.sizes[out]
            )
        elif node.link in _WHOLE and node.outs[0] in returned:
            returned.update(node.ins)
    return frozenset(v for v in returned if graph.is_float32[v])
