"""Values that are mostly a known number: `288 + 5 * tanh(h)`, a temperature or a coordinate.

What varies in them is all that counts later, and a rounding of the whole may be as large as that.
How large it is is not known: a curve is taken to be about one, as activations are, and what is
multiplied by a known number to be about that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxamp.plan.dataflow.provenance import Facts
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, movements

_FAR = 16.0  # times what varies: then 4 of 8 bits are left for that
_CHOOSING = ("select_n", "max", "min")
_HANDED = (Link.SLICE, Link.STACK, Link.INVARIANT, Link.RESULT)


class Level(NamedTuple):
    """A known number and about how much a value varies around it."""

    height: float
    spread: float

    @property
    def is_high(self) -> bool:
        """Whether the number is much the larger of the two."""
        return abs(self.height) >= _FAR * self.spread > 0


_USUAL = Level(0.0, 1.0)


def find_raised(graph: Graph, facts: Facts) -> frozenset[int]:
    """One sweep forward: activations that are a known number and a little."""
    levels: dict[int, Level] = {}
    known = graph.constants
    for node in graph.nodes:
        if not any(v in levels or v in known for v in node.ins):
            continue  # of what is usual, only the usual is made
        for source, out in movements(node):
            if facts.dense[out]:
                level = _level(graph, levels, node, source)
                if level is not _USUAL:
                    levels[out] = level
    return frozenset(v for v, level in levels.items() if level.is_high)


def _level(graph: Graph, levels: dict[int, Level], node: Node, source: int) -> Level:
    if node.role is Role.MOVE or node.link in _HANDED:
        return levels.get(source, _USUAL)
    if node.role is Role.ELEMENTWISE and node.name in _RULES:
        parts = [_of(graph, levels, v) for v in node.ins]
        level = _RULES[node.name](node, *parts)
        return level if abs(level.height) < 1e30 and level.spread < 1e30 else _USUAL
    if node.role is Role.MERGE or node.name in _CHOOSING:
        parts = [v for v in node.ins if graph.ours[v] and v not in graph.constants]
        return min((levels.get(v, _USUAL) for v in parts), key=_ratio, default=_USUAL)
    return _USUAL


def _of(graph: Graph, levels: dict[int, Level], value: int) -> Level:
    if value in graph.constants:
        return Level(graph.constants[value], 0.0)
    return levels.get(value, _USUAL)


def _ratio(level: Level) -> float:
    return abs(level.height) / level.spread if level.spread else 0.0


def _add(node: Node, one: Level, other: Level) -> Level:
    return Level(one.height + other.height, max(one.spread, other.spread))


def _sub(node: Node, one: Level, other: Level) -> Level:
    return Level(one.height - other.height, max(one.spread, other.spread))


def _mul(node: Node, one: Level, other: Level) -> Level:
    (a, da), (b, db) = one, other
    return Level(a * b, abs(a) * db + abs(b) * da + da * db)


def _div(node: Node, one: Level, other: Level) -> Level:
    if other.spread or not other.height:
        return _USUAL
    return Level(one.height / other.height, one.spread / abs(other.height))


def _power(node: Node, one: Level) -> Level:
    power = node.eqn.params.get("y", 2)
    if not one.is_high or abs(power) > 16:
        return _USUAL
    return Level(one.height**power, abs(power * one.height ** (power - 1)) * one.spread)


_RULES: dict[str, Callable[..., Level]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": lambda node, one: Level(-one.height, one.spread),
    "copy": lambda node, one: one,
    "integer_pow": _power,
    "square": _power,
}
