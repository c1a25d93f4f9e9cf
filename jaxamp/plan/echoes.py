"""Sums of an activation and a broadcast parameter whose cotangent is rounded for both.

Such a sum is fused, so it is f32, and so is its cotangent. That goes two ways: to the activation,
rounded as the activation is stored, and to the parameter, folded over rows by another kernel.
Unless the fold reads the rounding as well, the f32 cotangent is written to memory for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxamp.formats import Precision, is_narrow
from jaxamp.plan.decision import Echo
from jaxamp.plan.facts import Facts
from jaxamp.plan.graph import Graph, Role, movements


def find_echoes(
    graph: Graph, facts: Facts, fresh: Sequence[int], stored: Sequence[Precision | None]
) -> dict[int, Echo]:
    """How the cotangent of each such sum is rounded.

    Args:
      graph: the program.
      facts: what is known of its values.
      fresh: boundary values, and what is only moved from them.
      stored: precision in which each value is stored.
    """

    def is_spread(value: int, size: int) -> bool:
        return bool(fresh[value] or facts.layer[value]) and graph.sizes[value] != size

    spread = {
        out
        for node in graph.nodes
        if node.role is Role.MOVE
        for source, out in movements(node)
        if is_spread(source, graph.sizes[out])
    }
    echoes = {}
    for node in graph.nodes:
        if node.name in ("add", "sub") and stored[node.outs[0]] is Precision.F32:
            size = graph.sizes[node.outs[0]]
            others = [v for v in node.ins if v not in spread and not is_spread(v, size)]
            low = stored[others[0]] if len(others) == 1 and facts.dense[others[0]] else None
            if is_narrow(low):
                echoes[node.outs[0]] = Echo(node.ins.index(others[0]), low)
    return echoes
