"""Find values that are a large known constant plus a small variation: `288 + 5 * tanh(h)`.

Temperatures and coordinates are such. The variation is what matters later, and a rounding of the
sum may be as large as the variation. Its size is estimated: activations are about one, and
multiples of them as large as the known factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, movements

_LARGE = 16.0  # times the deviation, which then has 4 of bfloat16's 8 bits
_CHOOSING = ("select_n", "max", "min")
_FORWARDING = (Link.SLICE, Link.STACK, Link.INVARIANT, Link.RESULT)


class Offset(NamedTuple):
    """A known constant and the estimated deviation of a value from it."""

    center: float
    deviation: float

    @property
    def is_large(self) -> bool:
        """Return whether the constant is much larger than the deviation."""
        return abs(self.center) >= _LARGE * self.deviation > 0


_ACTIVATION = Offset(0.0, 1.0)


def find_large_offsets(graph: Graph, provenance: Provenance) -> frozenset[int]:
    """Return activations that consist of a large constant and a small variation."""
    offsets: dict[int, Offset] = {}
    known = graph.constants
    for node in graph.nodes:
        if not any(v in offsets or v in known for v in node.ins):
            continue  # without such an operand the result has no offset
        for source, out in movements(node):
            if provenance.dense[out]:
                offset = _offset(graph, offsets, node, source)
                if offset is not _ACTIVATION:
                    offsets[out] = offset
    return frozenset(v for v, offset in offsets.items() if offset.is_large)


def _offset(graph: Graph, offsets: dict[int, Offset], node: Node, source: int) -> Offset:
    if node.role is Role.MOVE or node.link in _FORWARDING:
        return offsets.get(source, _ACTIVATION)
    if node.role is Role.ELEMENTWISE and node.name in _RULES:
        parts = [_of(graph, offsets, v) for v in node.ins]
        offset = _RULES[node.name](node, *parts)
        return offset if abs(offset.center) < 1e30 and offset.deviation < 1e30 else _ACTIVATION
    if node.role is Role.MERGE or node.name in _CHOOSING:
        parts = [v for v in node.ins if graph.is_float32[v] and v not in graph.constants]
        return min((offsets.get(v, _ACTIVATION) for v in parts), key=_ratio, default=_ACTIVATION)
    return _ACTIVATION


def _of(graph: Graph, offsets: dict[int, Offset], value: int) -> Offset:
    if value in graph.constants:
        return Offset(graph.constants[value], 0.0)
    return offsets.get(value, _ACTIVATION)


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
        return _ACTIVATION
    return Offset(one.center / other.center, one.deviation / abs(other.center))


def _power(node: Node, one: Offset) -> Offset:
    power = node.eqn.params.get("y", 2)
    if not one.is_large or abs(power) > 16:
        return _ACTIVATION
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
