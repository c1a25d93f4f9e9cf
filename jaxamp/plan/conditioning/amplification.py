"""Find values whose rounding is amplified: a sweep forward for what is linear, one backward.

What Compute makes is rounded, as the policy says, and so is what is linear in its results: sums,
choices, known multiples, what a bounded curve gates. This is a residual stream, which hand-written
bfloat16 rounds too. Any other value that is in memory may be rounded only if all that reads it from
there is well conditioned: if no path without Compute leads from the reader to a steep curve, a
running fold, an index taken from an order, or a difference that may cancel. A sum of parts of one
value, shifted and scaled, as of neighbours in a stencil, may cancel in any case: then it does not
help to be linear in a result of Compute, only to be one. So may what is squared before a
difference. The facts of single primitives are in `core/taxonomy.py`.

The derivative of a loss is computed as the loss is, up to the first product of the backward pass:
where a model is right, cotangents nearly cancel, as of probabilities with those that were to be
predicted, or of a value with the next in time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from jaxamp.core.semantics import Linear, Rounding
from jaxamp.core.taxonomy import Trait
from jaxamp.jaxprs.name_stack import is_backward
from jaxamp.plan.dataflow.constraints import CANCELLED
from jaxamp.plan.dataflow.dataflow import Dataflow
from jaxamp.plan.graph.consumers import SUMS, find_origins, is_square
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, is_nonnegative, is_smaller
from jaxamp.plan.graph.sweeps import backward, forward, mark, union

AMPLIFIED = 1  # on a path without Compute to an amplifying operation
IN_MEMORY = 2  # the reader on that path takes the value from memory
IN_PARTS = 4  # what amplifies is a sum of parts of one value, and the path to it is linear
DIFFERED = 8  # a term of a difference that may cancel, or what is summed and scaled to be one
ORDERED = 16  # what amplifies is an order that an index is taken from

LINEAR = 1  # a result of Compute, or linear in such
BOUNDED = 2  # a bounded curve, or the square of one: see `_cancels`
LOGARITHM = 4  # of a statistic: what is less by it is a logarithm of probabilities, and not linear
PROPAGATED = 8  # made of a product of a backward pass

_STEEP_POWER = 3  # powers above it amplify
_JOINS = (Role.MERGE, Role.LINK, Role.CONVERT)
_SQUARES = ("square", "integer_pow", "mul")
_OF_ONE = (Trait.EXACT, Trait.ROUNDED)  # signs, masks, scales and shifts of one array


class Amplified(NamedTuple):
    """Values in memory of which a rounding is amplified before Compute reads it.

    Attributes:
      rounded: those that are not to be rounded.
      ordered: those from whose order an index is taken, a residual stream or not.
    """

    rounded: frozenset[int] = frozenset()
    ordered: frozenset[int] = frozenset()


def find_amplified(flow: Dataflow) -> Amplified:
    """Return values in memory of which a rounding is amplified."""
    sweep = _Amplification(flow)
    for node in forward(flow.graph, sweep.made):
        sweep.enter(node)
    for node in backward(flow.graph, sweep.bits):
        sweep.leave(node)
    products = {v for n in flow.graph.products if n.role is Role.CONTRACT for v in n.outs}
    made, origin = sweep.made, sweep.origin
    found = [(v, bits) for v, bits in enumerate(sweep.bits) if bits & IN_MEMORY]
    return Amplified(
        frozenset(
            v
            for v, bits in found
            if not made[v] & LINEAR or (bits & IN_PARTS and origin.get(v, v) not in products)
        ),
        frozenset(v for v, bits in found if bits & ORDERED),
    )


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


class _Amplification:
    """A sweep forward for what values are made of, and one backward for what is amplified.

    Attributes:
      made: per value, the flags `LINEAR`, `BOUNDED`, `LOGARITHM` and `PROPAGATED`.
      bits: per value, the other flags.
      origin: per value that is made of parts of one, that one.
    """

    def __init__(self, flow: Dataflow) -> None:
        self.graph, self.provenance, self.uses, self.regions = flow
        self.made, self.bits = (bytearray(len(self.graph.avals)) for _ in range(2))
        self.origin = _find_origins(self.graph)
        mark(self.made, self.graph.activations, LINEAR)
        for carry in self.graph.carries:
            self.made[carry.inner] = self.made[carry.result] = LINEAR * (not carry.keeps_dtype)

    def enter(self, node: Node) -> None:
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
                dense = self._dense(node)
                if dense or node.role is Role.CONTRACT:
                    flags |= self._is_linear(node, dense) * LINEAR
                    flags |= self._is_bounded(node, dense) * BOUNDED
                if not dense:
                    is_log = node.name == "log" and node.ins[0] not in self.graph.constants
                    flags |= is_log * LOGARITHM | given & LOGARITHM
            mark(made, node.outs, flags)

    def _dense(self, node: Node) -> list[int]:
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
        passes = node.role in _JOINS or (node.name in _SQUARES and len({*node.ins}) == 1)
        return passes and bool(dense) and all(self.made[v] & BOUNDED for v in dense)

    def leave(self, node: Node) -> None:
        """Mark the operands of a node that amplifies, or whose results lead to one that does."""
        if node.role is Role.CONTRACT or not union(self.provenance.dense, node.ins):
            return  # statistics are float32
        if node.role is Role.MOVE:
            for source, out in node.moves:
                if self.bits[out]:
                    self._mark(node, (source,), self.bits[out] & ~AMPLIFIED)
        elif self._adds_parts(node):
            self._mark(node, node.ins, IN_PARTS)
        else:
            given = union(self.bits, node.outs)
            if (given and self._passes(node)) or self._amplifies(node):
                flags = self._parts_before(node, given) | self._differed(node, given)
                flags |= ORDERED if self._orders(node) else given & ORDERED
                self._mark(node, node.ins, flags)

    def _mark(self, node: Node, values: Iterable[int], flags: int) -> None:
        dense, fused, is_far = self.provenance.dense, self.regions.fused, self.regions.is_far
        for value in values:
            if dense[value]:
                in_memory = not fused[value] or is_far(value, node)
                self.bits[value] |= AMPLIFIED | in_memory * IN_MEMORY | flags

    def _adds_parts(self, node: Node) -> bool:
        """Return whether a node adds parts of one value that are not the same."""
        dense = self._dense(node) if node.name in SUMS else ()
        return len(dense) == 2 and len({self.origin.get(v, v) for v in dense}) == 1

    def _parts_before(self, node: Node, given: int) -> int:
        """Return whether what is added in parts later is added in parts here already."""
        is_of_one = node.role is Role.ELEMENTWISE and node.trait in _OF_ONE
        is_kept = node.role is Role.MERGE or (is_of_one and len(self._dense(node)) == 1)
        return given & IN_PARTS if is_kept else 0

    def _differed(self, node: Node, given: int) -> int:
        """Return the flags of terms of a difference, and of what is squared before it.

        `mean(x²) - mean(x)²` over windows or groups: where the mean exceeds the deviation, the
        difference is smaller than the rounding of either. Over whole rows such means are float32.

        See: Chan, Golub and LeVeque, "Algorithms for computing the sample variance: analysis and
        recommendations", The American Statistician 37(3), 1983.
        """
        is_sub, is_differed = node.name == "sub", given & DIFFERED
        dense = self._dense(node) if is_sub or is_differed else ()
        if is_sub and len(dense) == 2 and self._cancels(node):
            return DIFFERED
        if is_differed and is_square(node):
            return IN_PARTS
        is_scaled = is_differed and node.trait in (*_OF_ONE, Trait.SUM)
        return DIFFERED if is_scaled and len(dense) == 1 else 0

    def _passes(self, node: Node) -> bool:
        """Return whether a later amplification counts for a node's operands too."""
        computes = node.role in (Role.ELEMENTWISE, Role.REDUCE)
        return not computes or node.semantics.rounding is not Rounding.STOPPED

    def _amplifies(self, node: Node) -> bool:
        if node.role is not Role.ELEMENTWISE and node.role is not Role.REDUCE:
            return False
        if self._orders(node) or self._derives_loss(node):
            return True
        if node.name == "integer_pow":
            return abs(node.eqn.params["y"]) > _STEEP_POWER
        rounding = node.semantics.rounding
        return rounding is Rounding.AMPLIFIED or (
            rounding is Rounding.CANCELLING and self._cancels(node)
        )

    def _derives_loss(self, node: Node) -> bool:
        """Return whether a node computes cotangents that no product has propagated yet."""
        (out, *_) = node.outs
        is_cotangent = is_backward(node.scope) and self.provenance.dense[out]
        return bool(is_cotangent and not self.made[out] & PROPAGATED)

    def _orders(self, node: Node) -> bool:
        """Return whether a node takes indices from an order, and something needs them."""
        picks = (self.graph.kinds[v] in "iu" and self.uses.needed[v] for v in node.outs)
        return node.trait is Trait.EXTREMUM and any(picks)

    def _cancels(self, node: Node) -> bool:
        """Return whether terms may be nearly equal: two activations, or one and a known number."""
        dense = self._dense(node)
        if len(dense) == 2:
            return node.name == "sub" and not all(self.made[v] & LINEAR for v in dense)
        if not dense or (
            node.name == "add" and all(is_nonnegative(self.graph, v) for v in node.ins)
        ):
            return False
        if all(v not in self.graph.constants for v in node.ins):
            return node.name == "sub"
        # The distance of a bounded curve to a known number is its derivative, which is small only
        # where cotangents may be lost.
        return not self.made[dense[0]] & BOUNDED


def _is_repeated(graph: Graph, value: int, out: int) -> bool:
    """Return whether a factor repeats fewer numbers than a product has: gates, scales of channels.

    It is as good as known: the product is rounded by as much as the other factor was, alike.
    """
    while not is_smaller(graph.sizes[value], graph.sizes[out]):
        if value not in graph.moved_from:
            return False
        value = graph.moved_from[value]
    return True
