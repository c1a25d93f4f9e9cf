"""Biases that are added where the convolution is computed, and so rounded once with it.

Before a norm of each image (a group norm, an instance norm) XLA stores the sum of a convolution and
its bias: it makes no arithmetic again for sums that keep both rows and columns. What it would store
is float32. Where both summands are narrow, the convolution's own kernel adds the bias.
"""

from __future__ import annotations

from jaxamp.plan.descent import descendants, is_movement
from jaxamp.plan.facts import Facts
from jaxamp.plan.graph import Graph, Node, Role
from jaxamp.plan.interior import Interior


def narrow_biases(graph: Graph, facts: Facts, interior: Interior) -> None:
    """Takes sums out of `interior.fused`, and fills in `interior.biased`."""
    for convolution in graph.named.get("conv_general_dilated", ()):
        for value in _biased(graph, facts, convolution):
            if interior.fused[value] and _is_summed_by_image(graph, value):
                interior.biased.add(value)
                interior.fused[value] = 0


def _biased(graph: Graph, facts: Facts, convolution: Node) -> tuple[int, ...]:
    """The sum of a convolution and a bias, if nothing else reads the convolution."""
    (out,) = convolution.outs
    if len(graph.uses[out]) != 1 or out in graph.outputs:
        return ()
    (reader,) = graph.uses[out]
    biases = [v for v in reader.ins if v != out]
    is_sum = reader.name == "add" and len(biases) == 1
    return reader.outs if is_sum and not facts.dense[biases[0]] else ()


def _is_summed_by_image(graph: Graph, value: int) -> bool:
    moved = descendants(graph, value, is_movement)
    return any(_keeps_both_ends(graph, reader) for v in moved for reader in graph.uses[v])


def _keeps_both_ends(graph: Graph, node: Node) -> bool:
    """Whether a sum leaves the major axis as it is, and folds more than the minor one."""
    if node.role is not Role.REDUCE or node.name != "reduce_sum":
        return False
    axes = node.eqn.params["axes"]
    return 0 not in axes and min(axes) < graph.avals[node.ins[0]].ndim - 2
