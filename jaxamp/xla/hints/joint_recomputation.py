"""Join what recomputes the same values, so that it is emitted as one unit.

Each unit that recomputes has a barrier of its own before what it reads. Equal recomputations behind
two barriers, or one behind none, are different ones to XLA: a kernel of both reads their operands
twice, and computes them twice. The backward pass of a gated MLP is such a kernel: `silu(gate)` is a
factor of one cotangent, and its derivative of the other. In `grad(amp(f))` both come from the
transpose of one group.

See: ``python -m benchmarks.fp8_step --target h200 --policy auto_mixed_bf16``, JAX 0.10.2: 19.03 GB
in a step of one block, 19.39 without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from jaxamp.plan.dataflow.fused_groups import Groups, Indices, find_root, operands_of
from jaxamp.plan.graph.consumers import closure
from jaxamp.plan.graph.graph import Frame, Nest, Role, nodes_of
from jaxamp.plan.precision.operand_reads import OperandReads


def join_recomputations(
    groups: Groups, readings: OperandReads, recomputed: Set[int]
) -> dict[Frame, Indices]:
    """Return the groups of each jaxpr, with those of one level joined that recompute the same.

    An elementwise equation that is in no group joins as well, if it reads such a value in float32.
    """
    return {
        frame: _Joiner(groups, readings, recomputed, frame).joined() if found else found
        for frame, found in groups.by_frame.items()
    }


class _Joiner:
    """Joiner of the groups of one jaxpr."""

    def __init__(
        self, groups: Groups, readings: OperandReads, recomputed: Set[int], frame: Frame
    ) -> None:
        self.fusible, self.levels = groups.fusible, groups.levels
        self.groups, self.sites, self.readings = groups.by_frame[frame], frame.sites, readings
        self.members = {index for group in self.groups for index in group}
        # Per value that later groups recompute, the equation that they recompute for it.
        self.maker = {
            value: index
            for index in self.members
            for value in frame.sites[index].outs
            if value in recomputed
        }

    def joined(self) -> Indices:
        """Return the groups, those of one level that recompute the same equation as one."""
        units = [*self.groups, *self._alone()]
        parent = list(range(len(units)))
        first: dict[tuple[int, int], int] = {}  # per level and recomputed equation, a unit
        for number, unit in enumerate(units):
            level = self._level(unit)
            for index in self._recomputed(unit):
                other = first.setdefault((level, index), number)
                parent[find_root(parent, number)] = find_root(parent, other)
        roots = [find_root(parent, number) for number in range(len(units))]
        members: dict[int, list[int]] = {root: [] for root in roots[: len(self.groups)]}
        for root, unit in zip(roots, units, strict=True):
            if root in members:  # equations that are in no group make none
                members[root] += unit
        return [sorted(unit) for unit in members.values()]

    def _alone(self) -> Iterator[list[int]]:
        """Yield elementwise equations in no group that read values to recompute, in float32."""
        for index, site in enumerate(self.sites):
            if index in self.members or isinstance(site, Nest) or not self.fusible[site.index]:
                continue
            again = [v for v in site.ins if v in self.maker]
            is_wide = all(self.readings.copy_for(v, site) is None for v in again)
            if again and is_wide and site.role is Role.ELEMENTWISE:
                yield [index]

    def _level(self, unit: Sequence[int]) -> int:
        return next(self.levels[v] for node in nodes_of(self.sites[unit[0]]) for v in node.outs)

    def _recomputed(self, unit: Sequence[int]) -> set[int]:
        """Return the equations of other groups that a unit recomputes."""

        def makers(index: int) -> list[int]:
            return [self.maker[v] for v in operands_of(self.sites[index]) if v in self.maker]

        return closure(unit, makers) - set(unit)
