"""Group equations that a compiler fuses into one kernel, with float32 values inside.

Kernels are ordered as far as the program determines it: fusible values have odd levels, all others
the even ones between, and equations of one level that read each other form one kernel. Precisions
depend on groups: an operand that a group only moves is widened before it is moved, and so is one
passed to a call inside. Whether a group is also emitted as one unit is steering.

A lookup that repeats rows of an activation for arithmetic begins a kernel, as its table is read
from memory, and a later kernel looks the rows up again, rather than read what was written of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set

from jaxamp.core.formats import Precision, is_narrow
from jaxamp.plan.dataflow.dataflow import Dataflow
from jaxamp.plan.dataflow.fusible import find_fusible, is_fused_call
from jaxamp.plan.dataflow.lookups import (
    gathers_whole_table,
    is_label_gather,
    is_looked_up_again,
    is_repeated_gather,
)
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.dataflow.regions import COSTLY, reduces_rows
from jaxamp.plan.graph.graph import Frame, Graph, Link, Nest, Node, Role, nodes_of
from jaxamp.plan.graph.sweeps import union


def find_levels(
    graph: Graph, provenance: Provenance, frame: Frame, fusible: bytearray
) -> tuple[list[int], set[Node]]:
    """Return the level at which each value is computed: as early as its operands allow.

    Small values, and those computed from parameters alone, have the level of their first reader.
    But a sum of rows of an activation belongs to the kernel that makes the rows; such sums that
    only later kernels read are returned as well.
    """
    levels = [0] * len(graph.avals)
    for node in graph.nodes:
        if node.link is Link.BACK:
            continue
        ready = 0
        for value in node.ins:
            if levels[value] > ready:
                ready = levels[value]
        reads_memory = node.name == "gather" and is_repeated_gather(graph, node)
        level = (ready + reads_memory) | 1 if fusible[node.index] else (ready | 1) + 1
        for value in node.outs:
            levels[value] = level
    latest = _latest_in_nests(provenance, frame, levels)
    ahead: set[Node] = set()
    for node in reversed(graph.nodes):
        if not fusible[node.index] or union(provenance.dense, node.outs):
            continue
        late = min(_earliest_reader(graph, levels, node), latest.get(node, math.inf))
        if not levels[node.outs[0]] < late < math.inf:
            continue
        is_of_activation = node.role is Role.REDUCE and union(provenance.dense, node.ins)
        if is_of_activation and reduces_rows(graph, node):
            ahead.add(node)
        else:
            for value in node.outs:
                levels[value] = int(late)
    return levels, ahead


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


Indices = list[list[int]]


class Groups:
    """Groups of a program's equations.

    Attributes:
      fusible: per node, 1 if it may belong to a group.
      levels: per value, the level at which it is computed; see `fused_groups.py`.
      ahead: sums of rows that only later levels read.
      label_gathers: gathers of single numbers from activations.
      by_frame: per jaxpr, the indices of each group's equations, in order. Jaxprs that belong to a
        group as a whole are left out.
      widened: nodes that only move operands of their own group, and so move them in float32.
    """

    def __init__(
        self,
        flow: Dataflow,
        frame: Frame,
        stored: Sequence[Precision | None],
        exact_narrow: Set[int],
    ) -> None:
        """Find the groups."""
        self._graph, self._provenance, _, self._regions = flow
        self._stored, self._exact_narrow = stored, exact_narrow
        lookups = self._graph.named.get("gather", ())
        self.label_gathers = {
            node for node in lookups if is_label_gather(self._graph, self._provenance, node)
        }
        self._tables = {node.ins[0] for node in self.label_gathers}
        self.fusible = find_fusible(flow, stored)
        for node in lookups:
            is_small = node in self.label_gathers or gathers_whole_table(self._graph, node)
            if is_small or is_looked_up_again(self._graph, self._provenance, node):
                self.fusible[node.index] = 1
        self.levels, self.ahead = find_levels(self._graph, self._provenance, frame, self.fusible)
        self.by_frame: dict[Frame, Indices] = {}
        self.widened: set[Node] = set()
        self._frame_of: dict[int, Frame] = {}  # of each value that a group computes
        self._members = bytearray(len(self._graph.nodes))
        self._level_of_nest: dict[Nest, int | None] = {}
        self._visit(frame)

    def are_together(self, node: Node, value: int) -> bool:
        """Return whether groups of one jaxpr compute a value and the results of a node."""
        frame = self._frame_of.get(value)
        return frame is not None and bool(node.outs) and self._frame_of.get(node.outs[0]) is frame

    def _visit(self, frame: Frame, *, fused: bool = False) -> None:
        """Find the groups of a jaxpr and of those inside; none if it belongs to a group itself."""
        groups = [] if fused else self._groups(frame)
        if not fused:
            self.by_frame[frame] = groups
        grouped = {index for group in groups for index in group}
        for index, site in enumerate(frame.sites):
            if isinstance(site, Nest):
                for inner in site.frames:
                    self._visit(inner, fused=fused or index in grouped)
            elif site.role is Role.MOVE and self._moves_within(site):
                self.widened.add(site)

    def _groups(self, frame: Frame) -> Indices:
        groups = []
        for group in self._connected(frame.sites):
            nodes = [node for index in group for node in nodes_of(frame.sites[index])]
            if self._is_worthwhile(nodes):
                groups.append(group)
                for node in nodes:
                    self._members[node.index] = 1
                    for value in node.outs:
                        self._frame_of[value] = frame
        return groups

    def _connected(self, sites: Sequence[Node | Nest]) -> Iterable[list[int]]:
        """Return equations of one level that read each other, or gather from one table."""
        levels = [self._level(site) for site in sites]
        parent = list(range(len(sites)))
        made_by: dict[int, int] = {}
        for index, (site, level) in enumerate(zip(sites, levels, strict=True)):
            if level is None:
                continue
            for value in operands_of(site):
                maker = made_by.get(value)
                if maker is not None and levels[maker] == level:
                    parent[find_root(parent, maker)] = find_root(parent, index)
                if value in self._tables and (maker is None or levels[maker] != level):
                    made_by[value] = index  # its other readers join this group
            for value in site.outs:
                made_by[value] = index
        members: dict[int, list[int]] = {}
        for index, level in enumerate(levels):
            if level is not None:
                members.setdefault(find_root(parent, index), []).append(index)
        return members.values()

    def _level(self, site: Node | Nest) -> int | None:
        """Return the level of an equation or call; `None` if it belongs to no group."""
        if isinstance(site, Node):
            return self.levels[site.outs[0]] if self.fusible[site.index] else None
        if site not in self._level_of_nest:
            self._level_of_nest[site] = self._common_level(site)
        return self._level_of_nest[site]

    def _common_level(self, nest: Nest) -> int | None:
        if not is_fused_call(nest):
            return None
        found = {site: self._level(site) for frame in nest.frames for site in frame.sites}
        dense = self._provenance.dense  # what is small, as indices are, may be read elsewhere first
        large = {n for site, n in found.items() if n is None or union(dense, site.outs)}
        levels = large or {*found.values()}
        return levels.pop() if len(levels) == 1 else None

    def _is_worthwhile(self, nodes: Sequence[Node]) -> bool:
        """Return whether arithmetic computes an activation that is float32 only by being fused.

        A curve alone does, for its derivative: JAX keeps two float32 arrays for that of a `tanh`.
        """
        stored, fused, dense = self._stored, self._regions.fused, self._provenance.dense
        is_wide = any(
            dense[v] and (fused[v] or (node.trait in COSTLY and is_narrow(stored[v])))
            for node in nodes
            for v in node.outs
        )
        return is_wide and any(node.role is not Role.MOVE for node in nodes)

    def _moves_within(self, node: Node) -> bool:
        """Return whether a movement moves operands of its own group."""
        if not self._members[node.index] or not self._exact_narrow.isdisjoint(node.outs):
            return False
        return not any(
            value in self._graph.outputs
            or not self._members[reader.index]
            or self.levels[reader.outs[0]] != self.levels[value]
            for value in node.outs
            for reader in self._graph.readers[value]
        )


def find_root(parent: list[int], index: int) -> int:
    """Return the equation that represents a group so far, shortening the path to it.

    See: union-find with path halving (Tarjan and van Leeuwen, "Worst-case analysis of set union
    algorithms", Journal of the ACM 31(2), 1984).
    """
    while parent[index] != index:
        parent[index] = index = parent[parent[index]]
    return index


def operands_of(site: Node | Nest) -> tuple[int, ...]:
    """Return the operands of an equation; for a call, the values inside that they are."""
    return site.ins if isinstance(site, Node) else site.entries
