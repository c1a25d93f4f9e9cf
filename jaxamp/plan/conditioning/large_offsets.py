"""Values that are mostly a known number: `288 + 5 * tanh(h)`, a temperature or a coordinate.

What varies in them is all that counts later, and a rounding of the whole may be as large as that.
How large it is is not known: a curve is taken to be about one, as activations are, and what is
multiplied by a known number to be about that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, movements

_LARGE = 16.0  # times what varies: then 4 of 8 bits are left for that
_CHOOSING = ("select_n", "max", "min")
_FORWARDING = (Link.SLICE, Link.STACK, Link.INVARIANT, Link.RESULT)


class Offset(NamedTuple):
    """A known number and about how much a value varies around it."""

    center: float
    deviation: float

    @property
    def is_large(self) -> bool:
        """Whether the number is much the larger of the two."""
        return abs(self.center) >= _LARGE * self.deviation > 0


_USUAL = Offset(0.0, 1.0)


def find_large_offsets(graph: Graph, provenance: Provenance) -> frozenset[int]:
    """One sweep forward: activations that are a known number and a little."""
    offsets: dict[int, Offset] = {}
    known = graph.constants
    for node in graph.nodes:
        if not any(v in offsets or v in known for v in node.ins):
            continue  # of what is usual, only the usual is made
        for source, out in movements(node):
            if provenance.dense[out]:
                offset = _offset(graph, offsets, node, source)
                if offset is not _USUAL:
                    offsets[out] = offset
    return frozenset(v for v, offset in offsets.items() if offset.is_large)


def _offset(graph: Graph, offsets: dict[int, Offset], node: Node, source: int) -> Offset:
    if node.role is Role.MOVE or node.link in _FORWARDING:
        return offsets.get(source, _USUAL)
    if node.role is Role.ELEMENTWISE and node.name in _RULES:
        parts = [_of(graph, offsets, v) for v in node.ins]
        offset = _RULES[node.name](node, *parts)
        return offset if abs(offset.center) < 1e30 and offset.deviation < 1e30 else _USUAL
    if node.role is Role.MERGE or node.name in _CHOOSING:
        parts = [v for v in node.ins if graph.is_float32[v] and v not in graph.constants]
        return min((offsets.get(v, _USUAL) for v in parts), key=_ratio, default=_USUAL)
    return _USUAL


def _of(graph: Graph, offsets: dict[int, Offset], value: int) -> Offset:
    if value in graph.constants:
        return Offset(graph.constants[value], 0.0)
    return offsets.get(value, _USUAL)


def _ratio(offset: Offset) -> float:
    return abs(offset.center) / offset.deviation if offset.deviation else 0.0


def _add(node: Node, one: Offset, other: Offset) -> Offset:
    return Offset(one.center + other.center, max(one.deviation, other.deviation))


def _sub(node: Node, one: Offset, other: Offset) -> Offset:
    return Offset(one.center - other.center, max(one.deviation, other.deviation))


def _mul(node: Node, one: Offset, other: Offset) -> Offset:
    (a, da), (b, db) = one, other
    return Offset(a * b, abs(a) * db + abs(b) * da + da * db)


def _div(node: Node, one: Offset, other: Offset) -> Offset:
    if other.deviation or not other.center:
        return _USUAL
    return Offset(one.center / other.center, one.deviation / abs(other.center))


def _power(node: Node, one: Offset) -> Offset:
    power = node.eqn.params.get("y", 2)
    if not one.is_large or abs(power) > 16:
        return _USUAL
    return Offset(one.center**power, abs(power * one.center ** (power - 1)) * one.deviation)


_RULES: dict[str, Callable[..., Offset]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": lambda node, one: Offset(-one.center, one.deviation),
    "copy": lambda node, one: one,
    "integer_pow": _power,
    "square": _power,
}
