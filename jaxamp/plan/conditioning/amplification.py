"""Find values whose rounding is amplified: a sweep forward for what is linear, one backward.

What Compute makes is rounded, as the policy says, and so is what is linear in its results: sums,
choices, known multiples. This is a residual stream, which hand-written bfloat16 rounds too. Any
other value that is in memory may be rounded only if all that reads it from there is well
conditioned: if no path without Compute leads from the reader to a steep curve, a running fold, an
index taken from an order, or a difference that may cancel. A sum of parts of one value, shifted
and scaled, as of neighbours in a stencil, may cancel in any case: then it does not help to be
linear in a result of Compute, only to be one. So may what is squared before a difference. The facts
of single primitives are in `core/taxonomy.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxamp.core.semantics import Linear, Rounding
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.conditioning.squares import is_square
from jaxamp.plan.dataflow.dataflow import Dataflow
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.consumers import find_origins
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, is_nonnegative, is_smaller
from jaxamp.plan.graph.sweeps import backward, forward, union

AMPLIFIED = 1  # on a path without Compute to an amplifying operation
IN_MEMORY = 2  # the reader on that path takes the value from memory
IN_PARTS = 4  # what amplifies is a sum of parts of one value, and the path to it is linear
DIFFERED = 8  # a term of a difference that may cancel, or what is summed and scaled to be one

_STEEP_POWER = 3  # powers above it amplify
_AROUND = (Link.INIT, Link.BACK)
_NO_JOINS = (None, *_AROUND)
_SQUARES = ("square", "integer_pow", "mul")
_SUMS = ("add", "sub")
_OF_ONE = (Trait.EXACT, Trait.ROUNDED)  # signs, masks, scales and shifts of one array


def find_amplified(flow: Dataflow) -> frozenset[int]:
    """Return values in memory of which a rounding is amplified before Compute reads it."""
    graph, sweep = flow.graph, _Amplification(flow)
    for node in backward(graph, sweep.bits):
        sweep.leave(node)
    made = {out for node in graph.nodes if node.role is Role.CONTRACT for out in node.outs}

    linear, origin = sweep.linear, sweep.origin
    return frozenset(
        v
        for v, bits in enumerate(sweep.bits)
        if bits & IN_MEMORY
        if not linear[v] or (bits & IN_PARTS and origin.get(v, v) not in made)
    )


def find_linear(graph: Graph, provenance: Provenance) -> bytearray:
    """Return, per value, 1 if it is a result of Compute or linear in such."""
    linear = bytearray(len(graph.avals))
    for value in graph.activations:
        linear[value] = 1
    for carry in graph.carries:
        linear[carry.inner] = linear[carry.result] = not carry.keeps_dtype
    for node in graph.nodes:
        if node.role is Role.MOVE or node.role is Role.CONVERT:
            for source, out in node.moves:
                linear[out] = linear[source]
        elif node.link not in _AROUND and _is_linear(graph, provenance, linear, node):
            for out in node.outs:
                linear[out] = 1
    return linear


def _is_linear(graph: Graph, provenance: Provenance, linear: bytearray, node: Node) -> bool:
    if node.role is Role.CONTRACT:
        return True
    kind, joins = node.semantics.linear, node.role is Role.MERGE or node.role is Role.LINK
    if node.role is Role.FIXED or (kind is Linear.NOT and not joins):
        return False
    dense = _dense(provenance, node)
    if kind is Linear.EACH and len(dense) > 1:
        dense = [v for v in dense if not _is_repeated(graph, v, node.outs[0])]
    if not dense or not all(linear[v] for v in dense):
        return False
    if joins:
        return True
    if kind is Linear.ALL and _adds_to_state(graph, provenance, node):
        return False
    if kind is Linear.EACH:
        return len(dense) == 1 and node.ins.count(dense[0]) == 1
    return kind is Linear.ALL or (kind is Linear.FIRST and dense == [node.ins[0]])


def _is_repeated(graph: Graph, value: int, out: int) -> bool:
    """Return whether a factor repeats fewer numbers than a product has: gates, scales of channels.

    It is as good as known: the product is rounded by as much as the other factor was, alike.
    """
    while not is_smaller(graph.sizes[value], graph.sizes[out]):
        if value not in graph.moved_from:
            return False
        value = graph.moved_from[value]
    return True


def _adds_to_state(graph: Graph, provenance: Provenance, node: Node) -> bool:
    """Return whether a node adds to a boundary value: `c + f(c)`, read later as `c - m`.

    A rounding of `c` is as large as its increments where `c` is large, and the difference leaves
    nothing else: weather rollouts, refined coordinates, forecasts added to the last observation.
    """
    size = graph.sizes[node.outs[0]]
    return any(provenance.state[v] and graph.sizes[v] == size for v in node.ins)


def _dense(provenance: Provenance, node: Node) -> list[int]:
    chosen = node.ins[1:] if node.name == "select_n" else node.ins
    return [v for v in dict.fromkeys(chosen) if provenance.dense[v]]


def _find_bounded(graph: Graph, provenance: Provenance) -> bytearray:
    """Return, per value, 1 if it is a bounded curve or the square of one.

    Its distance to a known number is the curve's derivative, which is small only where cotangents
    may be lost.
    """
    bounded = bytearray(len(graph.avals))
    for node in forward(graph, bounded):
        if node.role is Role.MOVE:
            for source, out in node.moves:
                bounded[out] = bounded[source]
        elif node.link is Link.BACK:
            bounded[node.outs[0]] = bounded[node.ins[0]]  # whatever the first iteration reads
        elif node.outs and _is_bounded(provenance, bounded, node):
            bounded[node.outs[0]] = 1
    return bounded


def _is_bounded(provenance: Provenance, bounded: bytearray, node: Node) -> bool:
    if node.trait is Trait.SMOOTH:
        return True
    passes = node.role is Role.MERGE or node.link not in _NO_JOINS
    if not passes and not (node.name in _SQUARES and len({*node.ins}) == 1):
        return False
    dense = _dense(provenance, node)
    return bool(dense) and all(bounded[v] for v in dense)


def _find_origins(graph: Graph) -> dict[int, int]:
    """Return, per value that is made of parts of one, moved, sorted, scaled and added, that one."""

    def passes(node: Node) -> bool:
        is_scaled = node.name == "mul" and sum(v not in graph.constants for v in node.ins) == 1
        return node.role is Role.MERGE or node.name in _SUMS or is_scaled

    def moves(node: Node) -> bool:
        return node.role is Role.MOVE or node.name == "neg" or _sorts(graph, node)

    return find_origins(graph, passes, moves)


def _sorts(graph: Graph, node: Node) -> bool:
    if node.trait is not Trait.EXTREMUM:
        return False
    return len({graph.avals[v].shape for v in (*node.ins, *node.outs)}) == 1


class _Amplification:
    """Backward sweep that marks values whose rounding is amplified."""

    def __init__(self, flow: Dataflow) -> None:
        self.graph, self.provenance, self.uses, self.regions = flow
        self.linear = find_linear(self.graph, self.provenance)
        self.bounded = _find_bounded(self.graph, self.provenance)
        self.origin = _find_origins(self.graph)
        self.bits = bytearray(len(self.graph.avals))

    def leave(self, node: Node) -> None:
        """Mark the operands of a node that amplifies, or whose results lead to one that does."""
        if node.role is Role.CONTRACT:
            return
        if node.role is Role.MOVE:
            for source, out in node.moves:
                if self.bits[out]:
                    self._mark(node, (source,), self.bits[out] & ~AMPLIFIED)
        elif self._adds_parts(node):
            self._mark(node, node.ins, IN_PARTS)
        elif self._amplifies(node) or self._passes(node):
            self._mark(node, node.ins, self._parts_before(node) | self._differed(node))

    def _mark(self, node: Node, values: Iterable[int], flags: int) -> None:
        dense, fused, is_far = self.provenance.dense, self.regions.fused, self.regions.is_far
        for value in values:
            if dense[value]:  # statistics are float32
                in_memory = not fused[value] or is_far(value, node)
                self.bits[value] |= AMPLIFIED | in_memory * IN_MEMORY | flags

    def _adds_parts(self, node: Node) -> bool:
        """Return whether a node adds parts of one value that are not the same."""
        if node.name not in _SUMS:
            return False
        dense = _dense(self.provenance, node)
        return len(dense) == 2 and len({self.origin.get(v, v) for v in dense}) == 1

    def _parts_before(self, node: Node) -> int:
        """Return whether what is added in parts later is added in parts here already."""
        if node.role is Role.MERGE:
            return union(self.bits, node.outs) & IN_PARTS
        is_of_one = node.role is Role.ELEMENTWISE and node.trait in _OF_ONE
        if is_of_one and len(_dense(self.provenance, node)) == 1:
            return union(self.bits, node.outs) & IN_PARTS
        return 0

    def _differed(self, node: Node) -> int:
        """Return the flags of terms of a difference, and of what is squared before it.

        `mean(x²) - mean(x)²` over windows or groups: where the mean exceeds the deviation, the
        difference is smaller than the rounding of either. Over whole rows such means are float32.

        See: Chan, Golub and LeVeque, "Algorithms for computing the sample variance: analysis and
        recommendations", The American Statistician 37(3), 1983.
        """
        is_sub, is_differed = node.name == "sub", union(self.bits, node.outs) & DIFFERED
        dense = _dense(self.provenance, node) if is_sub or is_differed else ()
        if is_sub and len(dense) == 2 and self._cancels(node):
            return DIFFERED
        if is_differed and is_square(node):
            return IN_PARTS
        is_scaled = is_differed and node.trait in (*_OF_ONE, Trait.SUM)
        return DIFFERED if is_scaled and len(dense) == 1 else 0

    def _passes(self, node: Node) -> bool:
        """Return whether a later amplification counts for a node's operands too."""
        if not union(self.bits, node.outs):
            return False
        if node.role is not Role.ELEMENTWISE and node.role is not Role.REDUCE:
            return True
        return node.semantics.rounding is not Rounding.STOPPED

    def _amplifies(self, node: Node) -> bool:
        if node.role is not Role.ELEMENTWISE and node.role is not Role.REDUCE:
            return False
        if node.trait is Trait.EXTREMUM:
            return self._orders(node)
        if node.name == "integer_pow":
            return abs(node.eqn.params["y"]) > _STEEP_POWER
        rounding = node.semantics.rounding
        return rounding is Rounding.AMPLIFIED or (
            rounding is Rounding.CANCELLING and self._cancels(node)
        )

    def _orders(self, node: Node) -> bool:
        """Return whether a node takes indices from an order, and something needs them."""
        return any(self.graph.kinds[v] in "iu" and self.uses.needed[v] for v in node.outs)

    def _cancels(self, node: Node) -> bool:
        """Return whether terms may be nearly equal: two activations, or one and a known number."""
        dense = _dense(self.provenance, node)
        if len(dense) == 2:
            return node.name == "sub" and not all(self.linear[v] for v in dense)
        if not dense or (
            node.name == "add" and all(is_nonnegative(self.graph, v) for v in node.ins)
        ):
            return False
        is_known = any(v in self.graph.constants for v in node.ins)
        return not self.bounded[dense[0]] if is_known else node.name == "sub"
