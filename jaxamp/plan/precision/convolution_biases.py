"""Find summands of a convolution before a norm of each image: a bias, a time embedding.

XLA does not recompute arithmetic for reductions that keep both the major and the minor axes, such
as those of a group norm or an instance norm: it stores their operand, in float32. So the sum is
stored narrow. A bias is narrow before too: where both summands are, the convolution's own kernel
adds it.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxamp.plan.dataflow.dataflow import Dataflow
from jaxamp.plan.graph.consumers import descendants, is_movement
from jaxamp.plan.graph.graph import Graph, Node, Role, is_smaller


class Sum(NamedTuple):
    """A sum of a convolution and a value broadcast over its pixels.

    Attributes:
      value: the sum.
      small: the value that is broadcast.
    """

    value: int
    small: int


def store_bias_sums(flow: Dataflow) -> None:
    """Take sums out of `regions.fused`, and fill in `regions.bias_sums`."""
    graph, provenance, _, regions = flow
    convolutions = graph.named.get("conv_general_dilated", ())
    for convolution in convolutions:
        sums = _sums(graph, convolution)
        if not sums or not _is_summed_by_image(graph, sums[-1].value):
            continue
        if all(regions.fused[s.value] for s in sums):
            first, last = sums[0], sums[-1]
            regions.fused[last.value] = 0
            if not provenance.dense[first.small]:
                regions.fused[first.value] = 0
                regions.bias_sums.add(first.value)


def _sums(graph: Graph, convolution: Node) -> list[Sum]:
    """Return the chain of sums that begins with a convolution and is read by nothing else."""
    (value,) = convolution.outs
    sums: list[Sum] = []
    while len(graph.readers[value]) == 1 and value not in graph.outputs:
        (reader,) = graph.readers[value]
        others = [v for v in reader.ins if v != value]
        if reader.name != "add" or len(others) != 1:
            break
        small = graph.origin(others[0])
        if not is_smaller(graph.sizes[small], graph.sizes[value]):
            break
        (value,) = reader.outs
        sums.append(Sum(value, small))
    return sums


def _is_summed_by_image(graph: Graph, value: int) -> bool:
    moved = descendants(graph, value, is_movement)
    return any(_keeps_both_ends(graph, reader) for v in moved for reader in graph.readers[v])


def _keeps_both_ends(graph: Graph, node: Node) -> bool:
    """Return whether a sum keeps the major axis, and reduces more than the minor one."""
    if node.role is not Role.REDUCE or node.name != "reduce_sum":
        return False
    axes = node.eqn.params["axes"]
    return 0 not in axes and min(axes) < graph.avals[node.ins[0]].ndim - 2
