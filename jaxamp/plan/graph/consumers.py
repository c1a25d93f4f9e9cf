"""What becomes of one value: a walk forward, from the nodes that read it to what they make.

And a walk back, from what was made to what it was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from jaxamp.plan.graph.graph import Graph, Node, Role, movements


def descendants(graph: Graph, start: int, passes: Callable[[Node], bool]) -> list[int]:
    """A value and all that is made of it, nearest first.

    Args:
      graph: the program.
      start: the value.
      passes: whether the walk goes on through a node, from what it reads to what it makes. What
        only moves makes of each operand what that becomes, and of indices nothing.
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
    """All values on the ways from some values to others, these included.

    Args:
      makers: what makes each value; without one, a way begins there too.
      starts: where ways begin.
      ends: where they end.
      passes: whether a way may lead through a value.
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
    """Whether a node only moves values; given to ``descendants``, it finds where a value goes."""
    return node.role is Role.MOVE


def _made(node: Node, value: int) -> Sequence[int]:
    if node.role is Role.MOVE:
        return [out for source, out in movements(node) if source == value]
    return node.outs
