"""Which equations XLA will fuse into one kernel with f32 values inside.

Such a group is emitted as one unit, under a checkpoint: the backward pass then keeps what the plan
stores, and computes the f32 insides again from it, in the kernel that needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from jaxamp.formats import Precision, is_narrow
from jaxamp.plan.demand import ESCAPES, REACHES, Demand
from jaxamp.plan.facts import UNBOUNDED, Facts
from jaxamp.plan.flags import union
from jaxamp.plan.graph import Frame, Graph, Link, Nest, Node, Role
from jaxamp.plan.interior import Interior
from jaxamp.plan.picks import picks, takes_all
from jaxamp.plan.statistics import find_statistics
from jaxamp.taxonomy import Trait

Site = Node | Nest

_FOREIGN = frozenset({"custom_vjp_call", "checkpoint", "remat2", "optimization_barrier"})
_ARITHMETIC = (Role.ELEMENTWISE, Role.CONVERT, Role.REDUCE, Role.MOVE, Role.MERGE)
_BETWEEN_DEVICES = (Trait.COLLECTIVE, Trait.ALLREDUCE, Trait.VARY)


class Fusions:
    """Finds the groups of a jaxpr.

    Attributes:
      kept: values inside a group that the backward pass reads rather than computes again.
      by_rules: values of a group that a derivative rule holds and keeps: see rectified.py.
      again: values that a later group computes again rather than reads.
      picking: nodes that look up single numbers of activations.
    """

    def __init__(
        self,
        graph: Graph,
        frame: Frame,
        facts: Facts,
        demand: Demand,
        interior: Interior,
        stored: Sequence[Precision | None],
        unwidened: Set[int],
    ) -> None:
        self.graph, self.facts, self.interior, self.stored = graph, facts, interior, stored
        self.unwidened = unwidened
        self.kept = bytearray(len(graph.avals))
        self.by_rules: set[int] = set()
        self.again = bytearray(len(graph.avals))
        self._members = bytearray(len(graph.nodes))
        self._frames: dict[int, Frame] = {}  # per value of a group, where the group is
        lowered = _find_lowered(graph, stored)
        self.picking = {node for node in graph.nodes if picks(graph, facts, node)}
        self._tables = {node.ins[0] for node in self.picking}
        self._fusible = bytearray(
            node in self.picking
            or takes_all(graph, node)
            or _is_fusible(graph, demand, interior, lowered, node)
            for node in graph.nodes
        )
        self._levels = _find_levels(graph, facts, frame, self._fusible)
        self._statistics = find_statistics(graph, facts, self._fusible, self._levels)
        self._level_of_nest: dict[Nest, int | None] = {}

    def groups(self, frame: Frame) -> list[list[int]]:
        """Indices of the equations of each group, in order; what is in no group is left out."""
        levels = [self._level(site) for site in frame.sites]
        parent = list(range(len(levels)))
        made_by: dict[int, int] = {}
        for index, (site, level) in enumerate(zip(frame.sites, levels, strict=True)):
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
        groups = [g for g in members.values() if self._is_worthwhile([frame.sites[i] for i in g])]
        for group in groups:
            for index in group:
                for node in _nodes(frame.sites[index]):
                    self._enter(node)
                    self._frames.update(dict.fromkeys(node.outs, frame))
        return groups

    def has(self, node: Node) -> bool:
        """Whether a node is in a group."""
        return self._members[node.index] == 1

    def remakes(self, node: Node, value: int) -> bool:
        """Whether the group of a node computes a value again: it has to be in the same jaxpr."""
        here = [self._frames.get(out) for out in node.outs]
        return bool(self.again[value] and here) and here[0] is self._frames.get(value) is not None

    def moves_within(self, node: Node) -> bool:
        """Whether a node only moves what its own group reads, and so widens."""
        if node.role is not Role.MOVE or not self.has(node):
            return False
        if not self.unwidened.isdisjoint(node.outs):
            return False
        return not any(
            value in self.graph.outputs
            or not self.has(reader)
            or self._levels[reader.outs[0]] != self._levels[value]
            for value in node.outs
            for reader in self.graph.uses[value]
        )

    def _level(self, site: Site) -> int | None:
        """When a site runs; ``None`` if it is no member of any group."""
        if isinstance(site, Node):
            return self._levels[site.outs[0]] if self._fusible[site.index] else None
        if site not in self._level_of_nest:
            self._level_of_nest[site] = self._common_level(site)
        return self._level_of_nest[site]

    def _common_level(self, nest: Nest) -> int | None:
        if not _is_call(nest):
            return None
        levels = {self._level(site) for frame in nest.frames for site in frame.sites}
        return levels.pop() if len(levels) == 1 else None

    def _is_worthwhile(self, sites: Sequence[Site]) -> bool:
        """Whether arithmetic makes an activation that is f32 only because it is fused."""
        facts, fused = self.facts, self.interior.fused
        nodes = [node for site in sites for node in _nodes(site)]
        is_wide = any(fused[v] and facts.dense[v] for node in nodes for v in node.outs)
        return is_wide and any(node.role is not Role.MOVE for node in nodes)

    def _enter(self, node: Node) -> None:
        """Makes a node a member of a group."""
        self._members[node.index] = 1
        is_statistic = self._statistics[node.index]
        for value in node.outs:
            if self.graph.ours[value]:
                if self._is_kept_by_rule(value):
                    self.by_rules.add(value)
                is_kept = is_statistic or self._is_stored(value) or value in self.by_rules
                self.kept[value] = is_kept
            self.again[value] = not is_statistic and self._is_cheap(value)

    def _is_cheap(self, value: int) -> bool:
        """Whether a value is nowhere in memory, and made of what is."""
        if value in self.graph.outputs or self.facts.state[value]:
            return False
        is_activation = self.graph.ours[value] and self.facts.dense[value]
        if value in self.interior.rectified and not self.interior.joined[value]:
            return True  # what it is made of is read anyway
        return not is_activation or bool(self.interior.fused[value])

    def _is_kept_by_rule(self, value: int) -> bool:
        """Whether a rule cuts off at zero what it had better read than make again.

        That is what joins several arrays. What is made of one, a TPU need not even store: it fuses
        this with the convolution that reads it.
        """
        is_cut_off = value in self.interior.rectified and value in self.graph.ruled_results
        return is_cut_off and bool(self.interior.joined[value]) and is_narrow(self.stored[value])

    def _is_stored(self, value: int) -> bool:
        """Whether a narrow value is read both here and later."""
        if not is_narrow(self.stored[value]) or value in self.unwidened:
            return False
        readers = [self._levels[r.outs[0]] for r in self.graph.uses[value] if r.outs]
        here = self._levels[value]
        return here in readers and any(level != here for level in readers)


def find_crossing(frame: Frame, interior: Interior) -> frozenset[int]:
    """What is made in one jaxpr and read in another, so that it cannot be computed again there.

    A call that holds no kernel is fused with what is around it, and so counts as part of that.
    """
    made: dict[int, Frame] = {}
    crossing: set[int] = set()

    def holds_kernel(nest: Nest) -> bool:
        return any(interior.kernels[node.index] for node in _nodes(nest))

    def visit(frame: Frame, home: Frame) -> None:
        for site in frame.sites:
            if isinstance(site, Nest):
                is_part = _is_call(site) and not holds_kernel(site)
                for inner in site.frames:
                    visit(inner, home if is_part else inner)
                continue
            for value in site.ins:
                if made.get(value, home) is not home:
                    crossing.add(value)
            for value in site.outs:
                made[value] = home

    visit(frame, frame)
    return frozenset(crossing)


def _root(parent: list[int], index: int) -> int:
    while parent[index] != index:
        parent[index] = index = parent[parent[index]]
    return index


def _operands(site: Site) -> tuple[int, ...]:
    return site.ins if isinstance(site, Node) else site.entries


def _is_fusible(
    graph: Graph, demand: Demand, interior: Interior, lowered: bytearray, node: Node
) -> bool:
    if node.trait is Trait.GENERATOR:
        return not node.ins
    if interior.kernels[node.index] or node.role not in _ARITHMETIC:
        return False
    if node.trait in _BETWEEN_DEVICES or node.name in _FOREIGN or node.eqn.effects:
        return False
    if node.role is not Role.REDUCE and all(_is_result(demand, lowered, v) for v in node.outs):
        return False  # an optimizer's update, say: it is fused as in float32, to the last bit
    # What is looked up by an index is a kernel's work.
    is_movement = node.role is Role.MOVE or node.role is Role.MERGE
    return not (is_movement and any(graph.kinds[v] in "iu" for v in node.ins[1:]))


def _find_lowered(graph: Graph, stored: Sequence[Precision | None]) -> bytearray:
    """Marks what arithmetic makes of narrow values, folds left out."""
    lowered = bytearray(map(is_narrow, stored))
    for node in graph.nodes:
        if node.role in (Role.ELEMENTWISE, Role.MOVE) and union(lowered, node.ins):
            for value in node.outs:
                lowered[value] = 1
    return lowered


def _is_result(demand: Demand, lowered: bytearray, value: int) -> bool:
    return demand.bits[value] & (ESCAPES | REACHES) == ESCAPES and not lowered[value]


def _find_levels(graph: Graph, facts: Facts, frame: Frame, fusible: bytearray) -> list[int]:
    """When each value is made: fusible equations run at odd levels, all else at even ones between.

    What is small, or made of parameters alone, is computed where it is first read.
    """
    levels = [0] * len(graph.avals)
    for node in graph.nodes:
        if node.link is Link.BACK:
            continue
        ready = max([levels[v] for v in node.ins], default=0)
        level = ready | 1 if fusible[node.index] else (ready | 1) + 1
        for value in node.outs:
            levels[value] = level
    latest = _latest_in_nests(facts, frame, levels)
    for node in reversed(graph.nodes):
        if fusible[node.index] and not union(facts.dense, node.outs):
            late = min(_earliest_reader(graph, levels, node), latest.get(node, UNBOUNDED))
            for value in node.outs if late < UNBOUNDED else ():
                levels[value] = max(levels[value], int(late))
    return levels


def _earliest_reader(graph: Graph, levels: list[int], node: Node) -> float:
    """The last odd level before the results of a node are first read."""
    found = [
        (levels[reader.outs[0]] - 1) | 1
        for value in node.outs
        for reader in graph.uses[value]
        if reader.outs and reader.link is not Link.BACK
    ]
    return min(found, default=UNBOUNDED)


def _latest_in_nests(facts: Facts, frame: Frame, levels: list[int]) -> dict[Node, int]:
    """Per node of a call, the one level at which all activations in it are made."""
    latest: dict[Node, int] = {}
    for site in frame.sites:
        if isinstance(site, Node):
            continue
        nodes = list(_nodes(site))
        made = {levels[v] for node in nodes for v in node.outs if facts.dense[v]}
        if _is_call(site) and len(made) == 1:
            latest.update(dict.fromkeys(nodes, *made))
        else:
            for inner in site.frames:
                latest.update(_latest_in_nests(facts, inner, levels))
    return latest


def _nodes(site: Site) -> Iterator[Node]:
    """The node itself, or all that an equation holds."""
    if isinstance(site, Node):
        yield site
        return
    for frame in site.frames:
        for inner in frame.sites:
            yield from _nodes(inner)


def _is_call(nest: Nest) -> bool:
    return nest.op.trait is Trait.CALL and nest.eqn.primitive.name not in _FOREIGN
