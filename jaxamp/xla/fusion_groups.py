"""Groups of equations that XLA will fuse into one kernel, with f32 values inside.

Such a group is emitted as one unit, under a checkpoint: the backward pass then keeps what the plan
stores, and computes the f32 insides again from it, in the kernel that needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from jaxamp.core.formats import Precision, is_narrow
from jaxamp.plan.dataflow.fusible import find_fusible, is_fused_call
from jaxamp.plan.dataflow.label_gathers import gathers_whole_table, is_label_gather
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.dataflow.regions import EQUALITIES, FusionRegions
from jaxamp.plan.dataflow.uses import Uses
from jaxamp.plan.graph.flags import union
from jaxamp.plan.graph.graph import Frame, Graph, Nest, Node, Role, nodes_of
from jaxamp.xla.kernel_order import find_levels
from jaxamp.xla.row_statistics import find_statistics


class FusionGroups:
    """Finds the groups of a jaxpr.

    Attributes:
      saved: values inside a group that the backward pass reads rather than computes again.
      saved_by_rules: values of a group that a derivative rule holds and keeps: see rectified.py.
      recomputed: values that a later group computes again rather than reads. Results of equality
        tests are read: what is computed twice may differ in its last bit.
      label_gathers: nodes that look up single numbers of activations.
    """

    def __init__(
        self,
        graph: Graph,
        frame: Frame,
        provenance: Provenance,
        uses: Uses,
        regions: FusionRegions,
        stored: Sequence[Precision | None],
        exact_narrow: Set[int],
    ) -> None:
        self.graph, self.provenance, self.regions, self.stored = graph, provenance, regions, stored
        self.exact_narrow = exact_narrow
        self.saved = bytearray(len(graph.avals))
        self.saved_by_rules: set[int] = set()
        self.recomputed = bytearray(len(graph.avals))
        self._members = bytearray(len(graph.nodes))
        self._frames: dict[int, Frame] = {}  # per value of a group, where the group is
        lookups = graph.named.get("gather", ())
        self.label_gathers = {node for node in lookups if is_label_gather(graph, provenance, node)}
        self._tables = {node.ins[0] for node in self.label_gathers}
        self._fusible = find_fusible(graph, uses, regions, stored)
        for node in lookups:
            if node in self.label_gathers or gathers_whole_table(graph, node):
                self._fusible[node.index] = 1
        self._side_by_side = self._find_side_by_side()
        self._levels = find_levels(graph, provenance, frame, self._fusible)
        self._statistics = find_statistics(graph, provenance, self._fusible, self._levels)
        self._level_of_nest: dict[Nest, int | None] = {}

    def groups(self, frame: Frame) -> list[list[int]]:
        """Indices of the equations of each group, in order; what is in no group is left out."""
        groups = [
            group
            for group in self._connected(frame.sites)
            if self._is_worthwhile([frame.sites[index] for index in group])
        ]
        for group in groups:
            for index in group:
                self._enter_site(frame.sites[index], frame)
        return groups

    def _connected(self, sites: Sequence[Node | Nest]) -> Iterable[list[int]]:
        """Equations of one level that read each other, or look up in one table."""
        levels = [self._level(site) for site in sites]
        parent = list(range(len(sites)))
        made_by: dict[int, int] = {}
        for index, (site, level) in enumerate(zip(sites, levels, strict=True)):
            if level is None:
                continue
            for value in _operands(site):
                maker = made_by.get(value)
                if maker is not None and levels[maker] == level:
                    parent[_root(parent, maker)] = _root(parent, index)
                if value in self._tables and (maker is None or levels[maker] != level):
                    made_by[value] = index  # its other readers are of this group, too
            for value in site.outs:
                made_by[value] = index
        members: dict[int, list[int]] = {}
        for index, level in enumerate(levels):
            if level is not None:
                members.setdefault(_root(parent, index), []).append(index)
        return members.values()

    def has(self, node: Node) -> bool:
        """Whether a node is in a group."""
        return self._members[node.index] == 1

    def recomputes(self, node: Node, value: int) -> bool:
        """Whether the group of a node computes a value again: it has to be in the same jaxpr."""
        here = [self._frames.get(out) for out in node.outs]
        return (
            bool(self.recomputed[value] and here) and here[0] is self._frames.get(value) is not None
        )

    def moves_within(self, node: Node) -> bool:
        """Whether a node only moves what its own group reads, and so widens."""
        if node.role is not Role.MOVE or not self.has(node):
            return False
        if not self.exact_narrow.isdisjoint(node.outs):
            return False
        return not any(
            value in self.graph.outputs
            or not self.has(reader)
            or self._levels[reader.outs[0]] != self._levels[value]
            for value in node.outs
            for reader in self.graph.readers[value]
        )

    def _level(self, site: Node | Nest) -> int | None:
        """When a site runs; ``None`` if it is no member of any group."""
        if isinstance(site, Node):
            return self._levels[site.outs[0]] if self._fusible[site.index] else None
        if site not in self._level_of_nest:
            self._level_of_nest[site] = self._common_level(site)
        return self._level_of_nest[site]

    def _common_level(self, nest: Nest) -> int | None:
        if not is_fused_call(nest):
            return None
        levels = {self._level(site) for frame in nest.frames for site in frame.sites}
        return levels.pop() if len(levels) == 1 else None

    def _is_worthwhile(self, sites: Sequence[Node | Nest]) -> bool:
        """Whether arithmetic makes an activation that is f32 only because it is fused."""
        provenance, fused = self.provenance, self.regions.fused
        nodes = [node for site in sites for node in nodes_of(site)]
        is_wide = any(fused[v] and provenance.dense[v] for node in nodes for v in node.outs)
        return is_wide and any(node.role is not Role.MOVE for node in nodes)

    def _enter_site(self, site: Node | Nest, frame: Frame) -> None:
        nodes = nodes_of(site)
        for node in nodes:
            self._enter(node)
            self._frames.update(dict.fromkeys(node.outs, frame))
        if isinstance(site, Nest) and any(self._statistics[node.index] for node in nodes):
            for value in site.outs:  # a call is computed again as a whole, statistics and all
                self.recomputed[value] = 0

    def _enter(self, node: Node) -> None:
        """Makes a node a member of a group."""
        self._members[node.index] = 1
        is_statistic = self._statistics[node.index]
        is_found = node.name in EQUALITIES and union(self.provenance.dense, node.ins)
        for value in node.outs:
            if self.graph.is_float32[value]:
                if self._is_saved_by_rule(value):
                    self.saved_by_rules.add(value)
                is_saved = is_statistic or self._is_stored(value) or value in self.saved_by_rules
                self.saved[value] = is_saved and value not in self._side_by_side
            self.recomputed[value] = not (is_statistic or is_found) and self._is_cheap(value)

    def _is_cheap(self, value: int) -> bool:
        """Whether a value is nowhere in memory, and made of what is."""
        if value in self.graph.outputs or self.provenance.state[value]:
            return False
        if value in self._side_by_side:
            return True
        is_activation = self.graph.is_float32[value] and self.provenance.dense[value]
        if value in self.regions.relu_outputs and not self.regions.joined[value]:
            return True  # what it is made of is read anyway
        is_read = value in self.regions.copied
        return not is_activation or bool(self.regions.fused[value] and not is_read)

    def _find_side_by_side(self) -> dict[int, int]:
        """Concatenations that no kernel reads, of arrays that are in memory, and of how many.

        To read the parts is to read as many bytes as of the whole, which need not be written.
        """
        found: dict[int, int] = {}
        for node in self.graph.named.get("concatenate", ()):
            (out,) = node.outs
            parts = sum(found.get(v, 1) for v in node.ins)
            is_stored = all(v in found or self._is_in_memory(v) for v in node.ins)
            is_fused = all(self._fusible[r.index] for r in self.graph.readers[out])
            if parts <= _MOST_PARTS and is_stored and is_fused and is_narrow(self.stored[out]):
                found[out] = parts
        return found

    def _is_in_memory(self, value: int) -> bool:
        """Whether a narrow activation is stored whatever becomes of it."""
        is_stored = is_narrow(self.stored[value]) and value not in self.exact_narrow
        return is_stored and bool(self.provenance.dense[value])

    def _is_saved_by_rule(self, value: int) -> bool:
        """Whether a rule cuts off at zero what it had better read than make again.

        That is what joins several arrays. What is made of one, a TPU need not even store: it fuses
        this with the convolution that reads it.
        """
        is_cut_off = value in self.regions.relu_outputs and value in self.graph.ruled_results
        return is_cut_off and bool(self.regions.joined[value]) and is_narrow(self.stored[value])

    def _is_stored(self, value: int) -> bool:
        """Whether a narrow value is read both here and later."""
        if not is_narrow(self.stored[value]) or value in self.exact_narrow:
            return False
        readers = [self._levels[r.outs[0]] for r in self.graph.readers[value] if r.outs]
        here = self._levels[value]
        return here in readers and any(level != here for level in readers)


_MOST_PARTS = 32  # XLA fuses no more than 96 operands and results


def _root(parent: list[int], index: int) -> int:
    """The equation that stands for the group of another, so far; the way to it is shortened."""
    while parent[index] != index:
        parent[index] = index = parent[parent[index]]
    return index


def _operands(site: Node | Nest) -> tuple[int, ...]:
    return site.ins if isinstance(site, Node) else site.entries
