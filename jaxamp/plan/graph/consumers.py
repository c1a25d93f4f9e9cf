"""Walks over the graph: forward to what is computed from a value, backward to its sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.graph.graph import Graph, Node, Role, movements


def descendants(graph: Graph, start: int, passes: Callable[[Node], bool]) -> list[int]:
    """Return a value and all values computed from it, nearest first.

    Args:
      graph: the program.
      start: the value.
      passes: whether the walk continues through a node, from operand to results. Through data
        movement it follows the moved operand only, not indices.
    """
    found, pending = {start}, [start]
    for value in pending:
        for node in graph.readers[value]:
            if passes(node):
                new = [v for v in _made(node, value) if v not in found]
                found.update(new)
                pending += new
    return pending


def between(
    makers: Mapping[int, Node], starts: Set[int], ends: Iterable[int], passes: Callable[[int], bool]
) -> set[int]:
    """Return all values on paths from `starts` to `ends`, both included.

    Args:
      makers: the node that computes each value; a path also begins at a value without one.
      starts: where paths begin.
      ends: where paths end.
      passes: whether a path may lead through a value.
    """
    found, pending = set[int](), list(ends)
    for value in pending:
        if value in found or not passes(value):
            continue
        found.add(value)
        if value not in starts and value in makers:
            pending += makers[value].ins
    return found


def is_movement(node: Node) -> bool:
    """Return whether a node only moves values; for `descendants` that is to find copies."""
    return node.role is Role.MOVE


def is_exact(node: Node) -> bool:
    """Return whether a node moves or joins values, or is exact in every format."""
    return node.role in (Role.MOVE, Role.MERGE) or node.trait is Trait.EXACT


def _made(node: Node, value: int) -> Sequence[int]:
    if node.role is Role.MOVE:
        return [out for source, out in movements(node) if source == value]
    return node.outs
