"""What becomes of one value: a walk forward, from the nodes that read it to what they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxamp.plan.graph import Graph, Node, Role, movements


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
        for node in graph.uses[value]:
            if passes(node):
                new = [v for v in _made(node, value) if v not in found]
                found.update(new)
                pending += new
    return pending


def is_movement(node: Node) -> bool:
    """Whether a node only moves values; given to ``descendants``, it finds where a value goes."""
    return node.role is Role.MOVE


def _made(node: Node, value: int) -> Sequence[int]:
    if node.role is Role.MOVE:
        return [out for source, out in movements(node) if source == value]
    return node.outs
