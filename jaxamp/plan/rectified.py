"""Results of a rectifier in a derivative rule, where the rule reads them for their sign alone.

The rule of a `relu` gives `max(x, 0)`, and compares it with zero for the tangents. Where the result
leaves narrow, the rule rounds it itself, holds the rounding and compares that, which has the same
sign. The backward pass then needs nothing of the rectifier but what is in memory anyway.
"""

from __future__ import annotations

from jaxamp.plan.graph import Graph
from jaxamp.plan.interior import Interior


def find_signed(graph: Graph, interior: Interior) -> set[int]:
    """Values that are cut off at zero and go on to Compute, and are read for their sign alone."""
    return {
        value
        for value in graph.onward & interior.rectified
        if graph.uses[value] and all(interior.reads_sign(graph, r) for r in graph.uses[value])
    }
