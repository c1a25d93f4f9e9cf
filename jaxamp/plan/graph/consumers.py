"""Walks over the graph: forward to what is computed from a value, backward to its sources."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, KeysView
from typing import TypeVar

from jaxamp.core.taxonomy import Trait
from jaxamp.jaxprs.contracted import is_vector
from jaxamp.plan.graph.graph import Graph, Node, Role

Parts = dict[int, frozenset[int]]
SUMS = ("add", "sub")
ADDS = (*SUMS, "add_any")
SCALES = ("mul", "div")
_NONE: frozenset[int] = frozenset()
_T = TypeVar("_T", bound=Hashable)


def reached(start: Iterable[_T], leads: Callable[[_T], Iterable[_T]]) -> Iterator[_T]:
    """Yield some values, or others, and all to which these lead, nearest first."""
    pending = list(dict.fromkeys(start))
    found = set(pending)
    for value in pending:
        yield value
        for other in leads(value):
            if other not in found:
                found.add(other)
                pending.append(other)


def closure(start: Iterable[_T], leads: Callable[[_T], Iterable[_T]]) -> KeysView[_T]:
    """Return what is `reached`."""
    return dict.fromkeys(reached(start, leads)).keys()


def descendants(graph: Graph, start: int, passes: Callable[[Node], bool]) -> KeysView[int]:
    """Return a value and all values computed from it by nodes that pass, nearest first.

    Through data movement the walk follows the moved operand only, not indices.
    """

    def made(value: int) -> list[int]:
        readers = (n for n in graph.readers[value] if passes(n))
        return [out for n in readers for out, read in read_for_results(n) if value in read]

    return closure([start], made)


def find_origins(graph: Graph, passes: Callable[[Node], bool]) -> dict[int, int]:
    """Return, per value that is made of one other and known numbers alone, that other.

    `passes` tells whether a node with no other origin among its operands passes it on; moves do.
    """
    origins: dict[int, int] = {}
    for node in graph.nodes:
        if node.role is Role.MOVE:
            for source, out in node.moves:
                origins[out] = origins.get(source, source)
        elif passes(node):
            found = {origins.get(v, v) for v in node.ins if v not in graph.constants}
            origins.update(dict.fromkeys(node.outs, *found) if len(found) == 1 else {})
    return origins


def find_drawn(graph: Graph) -> frozenset[int]:
    """Return what is made of the bits of numbers and known numbers alone, as samples are."""
    made = (Role.ELEMENTWISE, Role.FIXED)
    bits = frozenset(v for node in graph.nodes if node.trait is Trait.BITS for v in node.outs)
    origins = find_origins(graph, lambda n: n.role in made and bits.isdisjoint(n.outs))
    return bits.union(v for v, origin in origins.items() if origin in bits)


def find_parts(
    graph: Graph,
    made: Callable[[Node], Iterable[int] | None],
    passes: Callable[[Node], bool],
) -> Parts:
    """Return what values are sums of.

    `made` returns what the results of a node are a sum of, if that is none of its operands' parts;
    `passes` tells whether a node adds up the parts of its operands. Moves pass them on.
    """
    parts: Parts = {}
    for node in graph.nodes:
        own = made(node)
        if own is not None:
            parts.update(dict.fromkeys(node.outs, frozenset(own)))
        elif node.role is Role.MOVE:
            parts.update((out, parts[v]) for v, out in node.moves if v in parts)
        elif passes(node):
            found = _NONE.union(*(parts.get(v, _NONE) for v in node.ins))
            parts.update(dict.fromkeys(node.outs if found else (), found))
    return parts


def read_for_results(node: Node) -> list[tuple[int, tuple[int, ...]]]:
    """Return a node's results, each with the operands it is computed from."""
    if node.role is Role.MOVE:
        return [(out, (source,)) for source, out in node.moves]
    return [(out, node.ins) for out in node.outs]


def find_summed(graph: Graph, node: Node) -> int | None:
    """Return the array that a product with equal numbers sums, `x` in `x @ ones(n)`, if it does."""
    for place, value in enumerate(node.ins) if node.name == "dot_general" else ():
        low, high = graph.ranges[value]
        if low == high and is_vector(node.eqn, place):
            return node.ins[1 - place]
    return None


def is_square(node: Node) -> bool:
    """Return whether a node multiplies a value by itself."""
    if node.name == "mul":
        return node.ins[0] == node.ins[1]
    return node.name in ("square", "integer_pow") and node.eqn.params.get("y", 2) == 2


def is_movement(node: Node) -> bool:
    """Return whether a node only moves values; for `descendants` that is to find copies."""
    return node.role is Role.MOVE


def is_exact(node: Node) -> bool:
    """Return whether a node moves or joins values, or is exact in every format."""
    return node.role in (Role.MOVE, Role.MERGE) or node.trait is Trait.EXACT
