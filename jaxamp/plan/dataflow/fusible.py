"""Which equations and calls may be part of a group that XLA fuses into one kernel."""

from __future__ import annotations

from collections.abc import Sequence

from jaxamp.core.formats import Precision, is_narrow
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.regions import ARITHMETIC, FusionRegions, combines_masks
from jaxamp.plan.dataflow.uses import ESCAPES, REACHES, Uses
from jaxamp.plan.graph.flags import union
from jaxamp.plan.graph.graph import Graph, Nest, Node, Role

_FOREIGN = frozenset({"custom_vjp_call", "checkpoint", "remat2", "optimization_barrier", "held"})
_FUSED = (Role.ELEMENTWISE, Role.CONVERT, Role.REDUCE, Role.MOVE, Role.MERGE)
_BETWEEN_DEVICES = (Trait.COLLECTIVE, Trait.ALLREDUCE, Trait.VARY)


def find_fusible(
    graph: Graph, uses: Uses, regions: FusionRegions, stored: Sequence[Precision | None]
) -> bytearray:
    """Marks, per node, what may be part of a fused group.

    Args:
      graph: the program.
      uses: what its values are for.
      regions: which of them are never stored.
      stored: precision in which each value is stored.
    """
    lowered = _find_lowered(graph, stored)
    return bytearray(_is_fusible(graph, uses, regions, lowered, n) for n in graph.nodes)


def _is_fusible(
    graph: Graph, uses: Uses, regions: FusionRegions, lowered: bytearray, node: Node
) -> bool:
    if node.trait is Trait.GENERATOR:
        return not node.ins
    is_fused = node.role in _FUSED or combines_masks(graph, node)
    if regions.kernels[node.index] or not is_fused or not regions.bias_sums.isdisjoint(node.outs):
        return False
    if node.trait in _BETWEEN_DEVICES or node.name in _FOREIGN or node.eqn.effects:
        return False
    if node.role is not Role.REDUCE and all(_is_result(uses, lowered, v) for v in node.outs):
        return False  # an optimizer's update, say: it is fused as in float32, to the last bit
    # What is looked up by an index is a kernel's work.
    is_movement = node.role is Role.MOVE or node.role is Role.MERGE
    return not (is_movement and any(graph.kinds[v] in "iu" for v in node.ins[1:]))


def _find_lowered(graph: Graph, stored: Sequence[Precision | None]) -> bytearray:
    """Marks what arithmetic and movement, but no fold, make of narrow values."""
    lowered = bytearray(map(is_narrow, stored))
    for node in graph.nodes:
        if node.role in ARITHMETIC and union(lowered, node.ins):
            for value in node.outs:
                lowered[value] = 1
    return lowered


def _is_result(uses: Uses, lowered: bytearray, value: int) -> bool:
    return uses.bits[value] & (ESCAPES | REACHES) == ESCAPES and not lowered[value]


def is_fused_call(nest: Nest) -> bool:
    """Whether a call is fused with what is around it, as if its body stood there."""
    return nest.op.trait is Trait.CALL and nest.eqn.primitive.name not in _FOREIGN
