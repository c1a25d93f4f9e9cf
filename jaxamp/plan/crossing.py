"""Values that are made in one jaxpr and read in another, and so cannot be computed again there."""

from __future__ import annotations

from jaxamp.plan.fusible import is_fused_call
from jaxamp.plan.graph import Frame, Nest, nodes_of
from jaxamp.plan.interior import Interior


def find_crossing(frame: Frame, interior: Interior) -> frozenset[int]:
    """The values that cross from one jaxpr to another.

    A call that holds no kernel is fused with what is around it, and so counts as part of that.

    Args:
      frame: the outermost jaxpr.
      interior: which nodes are kernels.
    """
    made: dict[int, Frame] = {}
    crossing: set[int] = set()

    def holds_kernel(nest: Nest) -> bool:
        return any(interior.kernels[node.index] for node in nodes_of(nest))

    def visit(frame: Frame, home: Frame) -> None:
        for site in frame.sites:
            if isinstance(site, Nest):
                is_part = is_fused_call(site) and not holds_kernel(site)
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
