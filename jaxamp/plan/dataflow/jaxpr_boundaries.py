"""Find values computed in one jaxpr and read in another, which cannot be recomputed there."""

from __future__ import annotations

from jaxamp.plan.dataflow.fusible import is_fused_call
from jaxamp.plan.dataflow.regions import FusionRegions
from jaxamp.plan.graph.graph import Frame, Nest, nodes_of


def find_crossing_values(frame: Frame, regions: FusionRegions) -> frozenset[int]:
    """Return the values that cross from one jaxpr to another.

    A call without kernels is fused with its surroundings, and so counts as part of them.

    Args:
      frame: the outermost jaxpr.
      regions: which nodes are kernels.
    """
    crossing = _Crossing(regions)
    crossing.visit(frame, frame)
    return frozenset(crossing.found)


class _Crossing:
    """Walk over all jaxprs; a recursive closure would keep them alive in a reference cycle."""

    def __init__(self, regions: FusionRegions) -> None:
        self.regions = regions
        self.made: dict[int, Frame] = {}
        self.found: set[int] = set()

    def visit(self, frame: Frame, home: Frame) -> None:
        """Visit a jaxpr that is inlined into `home`, or is its own home."""
        for site in frame.sites:
            if isinstance(site, Nest):
                is_part = is_fused_call(site) and not self._holds_kernel(site)
                for inner in site.frames:
                    self.visit(inner, home if is_part else inner)
                continue
            for value in site.ins:
                if self.made.get(value, home) is not home:
                    self.found.add(value)
            for value in site.outs:
                self.made[value] = home

    def _holds_kernel(self, nest: Nest) -> bool:
        return any(self.regions.kernels[node.index] for node in nodes_of(nest))
