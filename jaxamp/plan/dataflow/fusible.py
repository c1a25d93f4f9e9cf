"""Find what XLA may fuse into one kernel."""

from __future__ import annotations

from collections.abc import Sequence

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision, is_narrow
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.dataflow import Dataflow
from jaxamp.plan.dataflow.regions import ARITHMETIC, FusionRegions
from jaxamp.plan.dataflow.uses import ESCAPES, REACHES, Uses
from jaxamp.plan.graph.graph import Graph, Nest, Node, Role
from jaxamp.plan.graph.sweeps import mark, union

_NEVER_FUSED = frozenset(
    {"custom_vjp_call", "fused_group", "remat2", "optimization_barrier", "rounding_barrier",
     "read_anew"}
)  # fmt: skip
_RETURNED = ESCAPES | REACHES
_BETWEEN_DEVICES = (Trait.COLLECTIVE, Trait.ALLREDUCE, Trait.VARY)


def find_fusible(flow: Dataflow, stored: Sequence[Precision | None]) -> bytearray:
    """Mark, per node, what may belong to a fused group."""
    graph, _, uses, regions = flow
    lowered = _find_lowered(graph, stored)
    return bytearray([_is_fusible(graph, uses, regions, lowered, n) for n in graph.nodes])


def _is_fusible(
    graph: Graph, uses: Uses, regions: FusionRegions, lowered: bytearray, node: Node
) -> bool:
    if node.trait is Trait.GENERATOR:
        return not node.ins
    if regions.kernels[node.index] or not regions.bias_sums.isdisjoint(node.outs):
        return False
    is_sent = node.trait in _BETWEEN_DEVICES
    if node.name == "reshard":  # which may leave an array where it is
        is_sent = not jax_compat.lie_alike(graph.avals[node.ins[0]], graph.avals[node.outs[0]])
    if is_sent or node.name in _NEVER_FUSED or node.eqn.effects:
        return False
    if node.role is not Role.REDUCE and False not in [
        uses.bits[v] & _RETURNED == ESCAPES and not lowered[v] for v in node.outs
    ]:
        return False  # an optimizer's update, say: as in float32, bit for bit
    # A gather or scatter by computed indices is a kernel.
    is_movement = node.role is Role.MOVE or node.role is Role.MERGE
    return not (is_movement and any(graph.kinds[v] in "iu" for v in node.ins[1:]))


def _find_lowered(graph: Graph, stored: Sequence[Precision | None]) -> bytearray:
    """Mark values that arithmetic and movement, but no reduction, compute from narrow values."""
    narrow = set(filter(is_narrow, set(stored)))
    lowered = bytearray([precision in narrow for precision in stored])
    for node in graph.nodes:
        if node.role in ARITHMETIC and union(lowered, node.ins):
            mark(lowered, node.outs, 1)
    return lowered


def is_fused_call(nest: Nest) -> bool:
    """Return whether a call is fused with its surroundings, as if its body were inlined."""
    return nest.op.trait is Trait.CALL and nest.eqn.primitive.name not in _NEVER_FUSED
