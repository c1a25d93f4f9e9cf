"""What a derivative rule cuts off at zero and compares there, for those who store it narrow.

The rule stores it narrow itself, holds that, and compares it: a narrow format has the sign. Of this
a backward pass needs nothing else, and it is in memory anyway.
"""

from __future__ import annotations

from jaxamp.plan.graph import Graph
from jaxamp.plan.interior import Interior


def find_signed(graph: Graph, interior: Interior) -> set[int]:
    """Values that are cut off at zero, leave narrow, and are read before for their sign alone."""
    return {
        value
        for value in graph.onward & interior.rectified
        if graph.uses[value] and all(interior.reads_sign(graph, r) for r in graph.uses[value])
    }
