"""Estimate signs and magnitudes: which values may underflow, and which quotients may overflow.

`1 + abs(x)` stays away from zero. A product of many probabilities does not: it is small in float32,
zero in float16, and a quotient by it overflows float16 before it is multiplied by something small.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxamp.core.semantics import semantics_of
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.flags import union
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, movements
from jaxamp.plan.graph.sweeps import forward

# Certain: a result has such a flag only if that follows from all operands.
NONNEGATIVE = 1
NONZERO = 2  # bounded away from zero: no rounding makes it zero
IS_NAN_MASK = 4  # a mask, true where a number is NaN
# Possible: a result has such a flag if one operand has it.
MAY_UNDERFLOW = 8  # may be zero in float16: an exponential, a product of many
MAY_OVERFLOW = 16  # is divided by such a value, and may overflow float16

_SURE, _MAYBE = NONNEGATIVE | NONZERO, MAY_UNDERFLOW | MAY_OVERFLOW

# Least magnitude that counts as nonzero: it and its reciprocal are in float16's range.
_FAR = 2**-8

_ALGEBRAIC = (Trait.EXACT, Trait.ROUNDED, Trait.SUM)
_ROOTS = ("sqrt", "square", "cbrt")
_JOINING = (Link.INVARIANT, Link.SLICE, Link.JOIN, Link.STACK)


def find_magnitudes(graph: Graph, provenance: Provenance) -> bytearray:
    """Return the flags of each value.

    Loop carries have only flags of what they may be, none of what is certain.
    """
    bits = bytearray(len(graph.avals))
    for value, number in graph.constants.items():
        bits[value] = (number >= 0) * NONNEGATIVE | (number >= _FAR) * NONZERO
    for node in forward(graph, bits):
        _enter(graph, provenance, bits, node)
    return bits


def _enter(graph: Graph, provenance: Provenance, bits: bytearray, node: Node) -> None:
    if node.role is Role.MOVE:
        for source, out in movements(node):
            bits[out] = bits[source]
    elif node.role is Role.MERGE or node.role is Role.LINK:
        floats = [v for v in node.ins if graph.is_float32[v]]
        sure = _shared(bits, floats) if node.link in (None, *_JOINING) else 0
        bits[node.outs[0]] |= sure | union(bits, floats) & _MAYBE
    elif node.role is Role.ELEMENTWISE or node.role is Role.REDUCE:
        sure = (
            _sure(bits, node)
            if node.role is Role.ELEMENTWISE
            else _sure_of_reduction(graph, bits, node)
        )
        for out in node.outs:
            maybe = _maybe(bits, node) if provenance.dense[out] and not sure & NONZERO else 0
            bits[out] |= sure | maybe


def _sure(bits: bytearray, node: Node) -> int:
    known, shared = [bits[v] for v in node.ins], _shared(bits, node.ins)
    if node.name == "max":
        return (known[0] | known[1]) & _SURE
    if node.name in ("add", "add_any"):  # neither term takes the other nearer to zero
        return (known[0] | known[1]) & _SURE if shared & NONNEGATIVE else 0
    if node.name == "mul" and node.ins[0] == node.ins[1]:
        return NONNEGATIVE
    if node.name == "ne":
        return (node.ins[0] == node.ins[1]) * IS_NAN_MASK
    if node.name == "select_n":
        return _shared(bits, node.ins[1:2] if known[0] & IS_NAN_MASK else node.ins[1:])
    if node.name == "integer_pow":
        power = node.eqn.params["y"]
        return known[0] & (_SURE if power > 0 else NONNEGATIVE) | (power % 2 == 0) * NONNEGATIVE
    facts = semantics_of(node.name, node.op)
    kept = facts.keeps_sign * NONNEGATIVE | facts.keeps_nonzero * NONZERO
    return shared & kept | facts.nonnegative * NONNEGATIVE


def _sure_of_reduction(graph: Graph, bits: bytearray, node: Node) -> int:
    """Return the certain flags of a reduction's result."""
    shared = _shared(bits, [v for v in node.ins if graph.is_float32[v]])
    if node.trait is Trait.EXTREMUM:
        return shared
    adds = node.trait in (Trait.SUM, Trait.PREFIX) and node.name != "scatter-sub"
    return shared & NONNEGATIVE if adds else 0


def _maybe(bits: bytearray, node: Node) -> int:
    if semantics_of(node.name, node.op).decays:
        return MAY_UNDERFLOW
    if node.name == "div":
        overflow = bits[node.ins[1]] & MAY_UNDERFLOW and MAY_OVERFLOW
        return bits[node.ins[0]] & _MAYBE | overflow
    if node.name == "integer_pow":
        return (
            (bits[node.ins[0]] & MAY_UNDERFLOW and MAY_OVERFLOW) if node.eqn.params["y"] < 0 else 0
        )
    keeps = node.trait in (*_ALGEBRAIC, Trait.PREFIX, Trait.EXTREMUM) or node.name in _ROOTS
    return union(bits, node.ins) & _MAYBE if keeps else 0


def _shared(bits: bytearray, values: Iterable[int]) -> int:
    found = _SURE
    for value in values:
        found &= bits[value]
    return found
