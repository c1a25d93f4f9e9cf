"""Find forget gates: factors by which a loop multiplies a carry in every iteration.

`h = f * h + i`: after `n` iterations the rounding of `f` is raised to the power `n`. In bfloat16
0.999 is 1, and nothing is forgotten. The carry is float32 anyway. The factor may be stored:
computed before the loop and sliced, or stacked by one loop for another. For loops written out in
Python see `unrolled_recurrences.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.conditioning.unrolled_recurrences import LinearPath
from jaxamp.plan.graph.consumers import SCALES
from jaxamp.plan.graph.graph import Carry, Graph, Link, Node, Role

_FORWARDING = (Link.SLICE, Link.STACK, Link.INVARIANT, Link.JOIN)


def find_forget_gates(graph: Graph, recurrences: LinearPath) -> frozenset[int]:
    """Return the factors of float32 carries, and the values these are moved or selected from."""
    found = set(_factors(recurrences))
    for carry in graph.carries:
        if carry.keeps_dtype and graph.is_float32[carry.inner]:
            found.update(_factors(_linear_path(graph, carry)))
    if found:
        for node in reversed(graph.nodes):
            found.update(_sources(node, found))
    return frozenset(v for v in found if graph.is_float32[v])


def _linear_path(graph: Graph, carry: Carry) -> LinearPath:
    """Return the nodes that make a carry linear in itself, each with the operand on that path."""
    read: dict[Node, int] = {}
    pending = [carry.inner]
    for value in pending:
        for node in graph.readers[value]:
            if node not in read and node.is_linear_in(value):
                read[node] = value
                pending += [v for v in node.outs if v <= carry.out]  # what is later leads nowhere
    leads, path = {carry.out}, []
    for node, value in sorted(read.items(), key=lambda item: -item[0].index):
        if leads.intersection(node.outs):
            leads.add(value)
            path.append((node, value))
    return path


def _factors(path: Sequence[tuple[Node, int]]) -> Iterable[int]:
    for node, value in path:
        if node.name in SCALES:
            yield from (v for v in node.ins if v != value)


def _sources(node: Node, found: set[int]) -> Iterable[int]:
    """Return the operands from which a node makes a gate by movement, selection or scaling."""
    if found.isdisjoint(node.outs):
        return ()
    if node.role is Role.MOVE:
        return [source for source, out in node.moves if out in found]
    passes = node.trait is Trait.EXACT or node.role is Role.MERGE or node.name in SCALES
    return node.ins if passes or node.link in _FORWARDING else ()
