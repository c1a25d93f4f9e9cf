"""What a loop multiplies one of its carries by in every turn: a decay, a forget gate.

`h = f * h + i`: a rounding of `f` is raised to the number of turns. 0.999 is 1 in bfloat16, and
then nothing is forgotten. The carry is in float32 anyway; here is what it is multiplied by, which
may be stored: computed before the loop and sliced, or stacked by one loop for another. A loop that
is written out has decays too: see recurrences.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.conditioning.unrolled_recurrences import LinearPath, is_linear
from jaxamp.plan.graph.graph import Carry, Graph, Link, Node, Role, movements

_SCALES = ("mul", "div")
_FORWARDING = (Link.SLICE, Link.STACK, Link.INVARIANT, Link.JOIN)


def find_forget_gates(graph: Graph, recurrences: LinearPath) -> frozenset[int]:
    """What carries that stay float32 are multiplied by, and what that is moved or chosen from."""
    found = set(_factors(recurrences))
    for carry in graph.carries:
        if carry.keeps_dtype and graph.is_float32[carry.inner]:
            found.update(_factors(_linear_path(graph, carry)))
    if found:
        for node in reversed(graph.nodes):
            found.update(_sources(node, found))
    return frozenset(v for v in found if graph.is_float32[v])


def _linear_path(graph: Graph, carry: Carry) -> LinearPath:
    """Nodes by which a carry is made of itself, and what of it they read."""
    read: dict[Node, int] = {}
    pending = [carry.inner]
    for value in pending:
        for node in graph.readers[value]:
            if node not in read and is_linear(node, value):
                read[node] = value
                pending += node.outs
    leads, path = {carry.out}, []
    for node, value in sorted(read.items(), key=lambda item: -item[0].index):
        if leads.intersection(node.outs):
            leads.add(value)
            path.append((node, value))
    return path


def _factors(path: Sequence[tuple[Node, int]]) -> Iterable[int]:
    for node, value in path:
        if node.name in _SCALES:
            yield from (v for v in node.ins if v != value)


def _sources(node: Node, found: set[int]) -> Iterable[int]:
    """What a node makes a decay of without arithmetic, or by multiplying."""
    if found.isdisjoint(node.outs):
        return ()
    if node.role is Role.MOVE:
        return [source for source, out in movements(node) if out in found]
    passes = node.trait is Trait.EXACT or node.role is Role.MERGE or node.name in _SCALES
    return node.ins if passes or node.link in _FORWARDING else ()
