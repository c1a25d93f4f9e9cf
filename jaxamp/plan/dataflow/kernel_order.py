"""Order kernels as far as the program determines it: a level for each value.

Fusible equations have odd levels, all others the even ones between. Equations of one level that
read each other form one kernel.
"""

from __future__ import annotations

import math

from jaxamp.plan.dataflow.fusible import is_fused_call
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.graph import Frame, Graph, Link, Node, nodes_of
from jaxamp.plan.graph.sweeps import union


def find_levels(
    graph: Graph, provenance: Provenance, frame: Frame, fusible: bytearray
) -> list[int]:
    """Return the level at which each value is computed: as early as its operands allow.

    Small values, and those computed from parameters alone, have the level of their first reader.
    """
    levels = [0] * len(graph.avals)
    for node in graph.nodes:
        if node.link is Link.BACK:
            continue
        ready = max([levels[v] for v in node.ins], default=0)
        level = ready | 1 if fusible[node.index] else (ready | 1) + 1
        for value in node.outs:
            levels[value] = level
    latest = _latest_in_nests(provenance, frame, levels)
    for node in reversed(graph.nodes):
        if fusible[node.index] and not union(provenance.dense, node.outs):
            late = min(_earliest_reader(graph, levels, node), latest.get(node, math.inf))
            for value in node.outs if late < math.inf else ():
                levels[value] = max(levels[value], int(late))
    return levels


def _earliest_reader(graph: Graph, levels: list[int], node: Node) -> float:
    """Return the last odd level before the results of a node are first read."""
    found = [
        (levels[reader.outs[0]] - 1) | 1
        for value in node.outs
        for reader in graph.readers[value]
        if reader.outs and reader.link is not Link.BACK
    ]
    return min(found, default=math.inf)


def _latest_in_nests(provenance: Provenance, frame: Frame, levels: list[int]) -> dict[Node, int]:
    """Return, per node of a call, the one level at which all activations in it are computed."""
    latest: dict[Node, int] = {}
    for site in frame.sites:
        if isinstance(site, Node):
            continue
        nodes = nodes_of(site)
        made = {levels[v] for node in nodes for v in node.outs if provenance.dense[v]}
        if is_fused_call(site) and len(made) == 1:
            latest.update(dict.fromkeys(nodes, *made))
        else:
            for inner in site.frames:
                latest.update(_latest_in_nests(provenance, inner, levels))
    return latest
