"""Find boundary values to which a network adds little, and that are read as differences.

`c = c + f(c)`, and later `c - m`: weather rollouts, refined coordinates, forecasts added to the
last observation. A rounding of `c` is as large as its increments where `c` is large, and the
difference leaves nothing else.
"""

from __future__ import annotations

from jaxamp.plan.graph.graph import Graph, Node, Role, movements
from jaxamp.plan.graph.sweeps import backward, forward

_COMPUTED = 1  # depends on Compute, or is looked up by computed or given indices
_STATE = 2  # a boundary value, or one plus activations
_DIFFERED = 4  # its rounding reaches a difference of two such values through sums and scalings

_SUMS = ("add", "add_any", "sub")
_SCALED = ("mul", "div")
_UNARY = ("neg", "copy", "reduce_precision")
_LINEAR = (*_SUMS, *_SCALED, *_UNARY, "select_n")


def find_state_increments(graph: Graph) -> frozenset[int]:
    """Return sums of boundary values and activations that are read as differences."""
    if not any(_may_differ(graph, node) for node in graph.named.get("sub", ())):
        return frozenset()
    bits = bytearray(len(graph.avals))
    for value in graph.sources:
        bits[value] = _STATE * graph.is_float32[value]
    for value in graph.activations:
        bits[value] = _COMPUTED
    for node in forward(graph, bits):
        _enter(graph, bits, node)
    for node in backward(graph, bits):
        _leave(bits, node)
    sought = _COMPUTED | _STATE | _DIFFERED
    return frozenset(v for v in range(len(bits)) if bits[v] & sought == sought)


def _may_differ(graph: Graph, node: Node) -> bool:
    return graph.constants.keys().isdisjoint(node.ins)


def _enter(graph: Graph, bits: bytearray, node: Node) -> None:
    """Record what the results of a node are computed from."""
    if node.role is Role.CONTRACT or (node.role is Role.MOVE and _looks_up(graph, node)):
        found = _COMPUTED
    elif node.role is Role.MOVE or node.role is Role.CONVERT:
        for source, out in movements(node):
            bits[out] |= bits[source] & (_COMPUTED | _STATE)
        return
    else:
        found = 0
        for value in node.ins:
            found |= bits[value] & _COMPUTED
        if _keeps_state(bits, node, found):
            found |= _STATE
    for out in node.outs:
        bits[out] |= found * graph.is_float32[out]


def _looks_up(graph: Graph, node: Node) -> bool:
    """Return whether a node gathers by indices that are not known, as from an embedding."""
    places = node.ins[1:]
    return any(graph.kinds[v] in "iu" and v not in graph.constants for v in places)


def _keeps_state(bits: bytearray, node: Node, found: int) -> bool:
    states = [bits[v] & _STATE for v in node.ins]
    if not found & _COMPUTED:
        return any(states)  # made of boundary values alone
    if node.role is Role.LINK or node.role is Role.MERGE or node.name in _SUMS:
        return any(states)
    if node.name == "select_n":
        return any(states[1:])
    if node.name in _SCALED:  # by what no network has made
        return any(
            s and not any(_is_computed(bits, o) for o in node.ins if o != v)
            for v, s in zip(node.ins, states, strict=True)
        )
    return node.name in _UNARY and any(states)


def _is_computed(bits: bytearray, value: int) -> int:
    return bits[value] & _COMPUTED


def _leave(bits: bytearray, node: Node) -> None:
    """Record which operands of a node are read as a difference."""
    if node.name == "sub" and all(bits[v] & _STATE for v in node.ins):
        differed = True
    elif node.role in (Role.LINK, Role.MOVE, Role.MERGE, Role.CONVERT) or node.name in _LINEAR:
        differed = any(bits[out] & _DIFFERED for out in node.outs)
    else:
        return
    if differed:
        for value in node.ins:
            if bits[value] & _STATE:
                bits[value] |= _DIFFERED
