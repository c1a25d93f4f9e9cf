"""Values that are made in one jaxpr and read in another, and so cannot be computed again there."""

from __future__ import annotations

from jaxamp.plan.dataflow.fusible import is_fused_call
from jaxamp.plan.dataflow.regions import FusionRegions
from jaxamp.plan.graph.graph import Frame, Nest, nodes_of


def find_crossing_values(frame: Frame, regions: FusionRegions) -> frozenset[int]:
    """The values that cross from one jaxpr to another.

    A call that holds no kernel is fused with what is around it, and so counts as part of that.

    Args:
      frame: the outermost jaxpr.
      regions: which nodes are kernels.
    """
    crossing = _Crossing(regions)
    crossing.visit(frame, frame)
    return frozenset(crossing.found)


class _Crossing:
    """A walk over all jaxprs; a function that calls itself would hold them in a cycle."""

    def __init__(self, regions: FusionRegions) -> None:
        self.regions = regions
        self.made: dict[int, Frame] = {}
        self.found: set[int] = set()

    def visit(self, frame: Frame, home: Frame) -> None:
        """Goes through a jaxpr, which counts as part of another or is its own home."""
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
