"""Sums that are divided by sums: an attention that is normalised after its product with the values.

Either may be beyond float16 and their quotient is not. A norm is no such quotient: what it divides
by is made of the value itself, which is stored however large it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxamp.plan.facts import DENSE, STATISTIC, Facts
from jaxamp.plan.graph import Graph, Node, Role, movements

_FUSED = (Role.ELEMENTWISE, Role.MOVE, Role.REDUCE, Role.MERGE)


def is_of_quotient(graph: Graph, facts: Facts, value: int) -> bool:
    """Whether a value, or what it is moved to, and another are divided."""
    readers = [r for v in _follow(graph, value, (Role.MOVE,)) for r in graph.uses[v]]
    quotients = [r for r in readers if _is_quotient(facts, r)]
    if not quotients:
        return False
    made = set(_follow(graph, value, _FUSED))
    return any(not made.issuperset(r.ins) for r in quotients)


def _is_quotient(facts: Facts, node: Node) -> bool:
    """Whether a node divides what is computed from activations by what is."""
    return node.name == "div" and all(facts.bits[v] & (DENSE | STATISTIC) for v in node.ins)


def _follow(graph: Graph, start: int, through: tuple[Role, ...]) -> Iterable[int]:
    """A value, and what nodes of some roles make of it."""
    found, pending = {start}, [start]
    for value in pending:
        for node in graph.uses[value]:
            if node.role in through:
                new = [v for v in _made(node, value) if v not in found]
                found.update(new)
                pending += new
    return pending


def _made(node: Node, value: int) -> Iterable[int]:
    """What a node makes of one of its operands."""
    if node.role is Role.MOVE:
        return [out for source, out in movements(node) if source == value]
    return node.outs
