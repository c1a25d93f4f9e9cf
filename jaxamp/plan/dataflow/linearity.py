"""Find what values are made of: what is linear in results of Compute, and bounded curves.

What Compute makes is rounded, as the policy says, and so is what is linear in its results: sums,
choices, known multiples, what a bounded curve gates. This is a residual stream, which hand-written
bfloat16 rounds too.
"""

from __future__ import annotations

from jaxamp.core.semantics import Linear
from jaxamp.core.taxonomy import Trait
from jaxamp.jaxprs.name_stack import is_backward
from jaxamp.plan.dataflow.constraints import CANCELLED
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.consumers import SUMS, find_origins
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, is_smaller
from jaxamp.plan.graph.sweeps import forward, mark, union

LINEAR = 1  # a result of Compute, or linear in such
BOUNDED = 2  # a bounded curve, or the square of one, shifted or scaled
LOGARITHM = 4  # of a statistic: what is less by it is a logarithm of probabilities, and not linear
PROPAGATED = 8  # made of a product of a backward pass

_JOINS = (Role.MERGE, Role.LINK, Role.CONVERT)
_OF_ONE = ("square", "integer_pow", "mul", *SUMS)


class Linearity:
    """Flags of what values are made of, from a sweep forward."""

    def __init__(self, graph: Graph, provenance: Provenance) -> None:
        self.graph, self.provenance = graph, provenance
        # Per value, the flags `LINEAR`, `BOUNDED`, `LOGARITHM` and `PROPAGATED`.
        self.made = bytearray(len(graph.avals))
        self.origin = _find_origins(graph)  # per value that is made of parts of one, that one
        mark(self.made, graph.activations, LINEAR)
        for carry in graph.carries:
            self.made[carry.inner] = self.made[carry.result] = LINEAR * (not carry.keeps_dtype)
        for node in forward(graph, self.made):
            self._enter(node)

    def _enter(self, node: Node) -> None:
        """Find what the results of a node are made of."""
        made = self.made
        if node.role is Role.MOVE:
            for source, out in node.moves:
                made[out] = made[source]
        elif node.link is Link.BACK:  # a carry is bounded whatever the first iteration reads
            (last,), (first,) = node.ins, node.outs
            kept, found = LINEAR | PROPAGATED, BOUNDED | PROPAGATED
            made[first] = made[first] & kept | made[last] & found
        else:
            given = union(made, node.ins)
            flags = given & PROPAGATED
            if node.role is Role.CONTRACT and is_backward(node.scope):
                flags = PROPAGATED
            if node.link is not Link.INIT:
                dense = self.dense(node)
                if dense or node.role is Role.CONTRACT:
                    flags |= self._is_linear(node, dense) * LINEAR
                    flags |= self._is_bounded(node, dense) * BOUNDED
                if not dense:
                    is_log = node.name == "log" and node.ins[0] not in self.graph.constants
                    flags |= is_log * LOGARITHM | given & LOGARITHM
            mark(made, node.outs, flags)

    def dense(self, node: Node) -> list[int]:
        """Return the activations that a node combines."""
        dense, chosen = self.provenance.dense, node.ins[node.name == "select_n" :]
        found = [v for v in chosen if dense[v]]
        return found if len(found) < 2 else [*dict.fromkeys(found)]

    def _is_linear(self, node: Node, dense: list[int]) -> bool:
        if node.role is Role.CONTRACT:  # one that is cancelled is not rounded itself
            return self.graph.precise.get(node) != CANCELLED
        kind, joins = node.semantics.linear, node.role in _JOINS
        if node.role is Role.FIXED or (kind is Linear.NOT and not joins):
            return False
        if kind is Linear.EACH and len(dense) > 1:
            graph, made, out = self.graph, self.made, node.outs[0]
            # A bounded factor loses nothing that the other has not lost.
            dense = [v for v in dense if not (made[v] & BOUNDED or _is_repeated(graph, v, out))]
        if not dense or not all(self.made[v] & LINEAR for v in dense):
            return False
        if joins:
            return True
        if kind is Linear.ALL:
            return not self._adds_to_state(node) and not union(self.made, node.ins) & LOGARITHM
        return len(dense) == 1 and node.is_linear_in(dense[0])

    def _adds_to_state(self, node: Node) -> bool:
        """Return whether a node adds to a boundary value: `c + f(c)`, read later as `c - m`.

        A rounding of `c` is as large as its increments where `c` is large, and the difference
        leaves nothing else: weather rollouts, refined coordinates, forecasts added to the last
        observation, scores of an alignment, whose carry is shifted before.
        """
        sizes, state = self.graph.sizes, self.provenance.state
        added = (self.origin.get(v, v) for v in node.ins)
        return any(state[v] and sizes[v] == sizes[node.outs[0]] for v in added)

    def _is_bounded(self, node: Node, dense: list[int]) -> bool:
        if node.trait is Trait.SMOOTH:
            return True
        if node.role not in _JOINS:  # but of one value: its square, a known shift or scale
            others = {v for v in node.ins if v not in self.graph.constants}
            if node.name not in _OF_ONE or len(others) != 1:
                return False
        return bool(dense) and all(self.made[v] & BOUNDED for v in dense)


def _find_origins(graph: Graph) -> dict[int, int]:
    """Return, per value that is made of parts of one, moved, sorted, scaled and added, that one."""

    def passes(node: Node) -> bool:
        is_scaled = node.name == "mul" and sum(v not in graph.constants for v in node.ins) == 1
        is_summed = node.role is Role.MERGE or node.name in (*SUMS, "neg")
        return is_scaled or is_summed or _sorts(graph, node)

    return find_origins(graph, passes)


def _sorts(graph: Graph, node: Node) -> bool:
    values = *node.ins, *node.outs
    return node.trait is Trait.EXTREMUM and len({graph.avals[v].shape for v in values}) == 1


def _is_repeated(graph: Graph, value: int, out: int) -> bool:
    """Return whether a factor repeats fewer numbers than a product has: gates, scales of channels.

    It is as good as known: the product is rounded by as much as the other factor was, alike.
    """
    while not is_smaller(graph.sizes[value], graph.sizes[out]):
        if value not in graph.moved_from:
            return False
        value = graph.moved_from[value]
    return True
