"""Find results of a ReLU in a derivative rule, where the rule reads their sign alone.

The rule of `relu` returns `max(x, 0)`, and compares it with zero for the tangents. Where the result
leaves narrow, the rule rounds it itself, behind a barrier, and compares that, which has the same
sign. The backward pass then needs no residual of the ReLU but its stored result.

Tangents are rounded before they are masked rather than after, which gives the same number.
Transposed, a cotangent is masked while it is narrow: so the narrow cotangent is stored, rather than
the mask beside it.
"""

from __future__ import annotations

from jaxamp.plan.dataflow.regions import FusionRegions
from jaxamp.plan.graph.graph import Graph


def find_relu_signs(graph: Graph, regions: FusionRegions) -> set[int]:
    """Return results of ReLUs that Compute reads and whose sign alone is read besides."""
    return {
        value
        for value in graph.onward & regions.relu_outputs
        if graph.readers[value] and all(regions.reads_sign(graph, r) for r in graph.readers[value])
    }


def find_relu_tangents(graph: Graph, signed: set[int]) -> set[int]:
    """Return the tangents that such a sign selects and the rule returns."""
    signs = {out for value in signed for reader in graph.readers[value] for out in reader.outs}
    masks = (node for node in graph.named.get("select_n", ()) if node.ins[0] in signs)
    return {
        out for node in masks for out in node.outs if out in graph.onward if not graph.readers[out]
    }
