"""Find values whose rounding is amplified, in a sweep backward.

What Compute makes and what is linear in that is rounded (`linearity.py`). Any other value that is
in memory may be rounded only if all that reads it from there is well conditioned: if no path
without Compute leads from the reader to a steep curve, a running fold, an index taken from an
order, or a difference that may cancel. A sum of parts of one value, shifted and scaled, as of
neighbours in a stencil, may cancel in any case: then it does not help to be linear in a result of
Compute, only to be one. So may what is squared before a difference. The facts of single primitives
are in `core/taxonomy.py`.

The derivative of a loss is computed as the loss is, up to the first product of the backward pass:
where a model is right, cotangents nearly cancel, as of probabilities with those that were to be
predicted, or of a value with the next in time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from jaxamp.core.semantics import Rounding
from jaxamp.core.taxonomy import Trait
from jaxamp.jaxprs.name_stack import is_backward
from jaxamp.plan.dataflow.dataflow import Dataflow
from jaxamp.plan.dataflow.linearity import BOUNDED, LINEAR, PROPAGATED, Linearity
from jaxamp.plan.graph.consumers import SUMS, is_square
from jaxamp.plan.graph.graph import Node, Role, is_nonnegative
from jaxamp.plan.graph.sweeps import backward, union

AMPLIFIED = 1  # on a path without Compute to an amplifying operation
IN_MEMORY = 2  # the reader on that path takes the value from memory
IN_PARTS = 4  # what amplifies is a sum of parts of one value, and the path to it is linear
DIFFERED = 8  # a term of a difference that may cancel, or what is summed and scaled to be one
ORDERED = 16  # what amplifies is an order that an index is taken from

_STEEP_POWER = 3  # powers above it amplify
_OF_ONE = (Trait.EXACT, Trait.ROUNDED)  # signs, masks, scales and shifts of one array


class Amplified(NamedTuple):
    """Values in memory of which a rounding is amplified before Compute reads it."""

    rounded: frozenset[int] = frozenset()  # those that are not to be rounded
    # Those from whose order an index is taken, a residual stream or not.
    ordered: frozenset[int] = frozenset()


def find_amplified(flow: Dataflow, linearity: Linearity) -> Amplified:
    """Return values in memory of which a rounding is amplified."""
    sweep = _Amplification(flow, linearity)
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


class _Amplification:
    """A sweep backward; `bits` are the flags of each value."""

    def __init__(self, flow: Dataflow, linearity: Linearity) -> None:
        self.graph, self.provenance, self.uses, self.regions = flow
        self.made, self.origin, self.dense = linearity.made, linearity.origin, linearity.dense
        self.bits = bytearray(len(self.graph.avals))

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
        dense = self.dense(node) if node.name in SUMS else ()
        return len(dense) == 2 and len({self.origin.get(v, v) for v in dense}) == 1

    def _parts_before(self, node: Node, given: int) -> int:
        """Return whether what is added in parts later is added in parts here already."""
        is_of_one = node.role is Role.ELEMENTWISE and node.trait in _OF_ONE
        is_kept = node.role is Role.MERGE or (is_of_one and len(self.dense(node)) == 1)
        return given & IN_PARTS if is_kept else 0

    def _differed(self, node: Node, given: int) -> int:
        """Return the flags of terms of a difference, and of what is squared before it.

        `mean(x²) - mean(x)²` over windows or groups: where the mean exceeds the deviation, the
        difference is smaller than the rounding of either. Over whole rows such means are float32.

        See: Chan, Golub and LeVeque, "Algorithms for computing the sample variance: analysis and
        recommendations", The American Statistician 37(3), 1983.
        """
        is_sub, is_differed = node.name == "sub", given & DIFFERED
        dense = self.dense(node) if is_sub or is_differed else ()
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
        dense = self.dense(node)
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
