"""Find operations that are exact in a narrow format: masks, signs, scales by powers of two.

Before the first arithmetic of a fused region they run in the format of their operands, and so do
their cotangents: no number changes, and what a compiler stores of the region is narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxamp.core.formats import Precision
from jaxamp.plan.dataflow.regions import FusionRegions
from jaxamp.plan.graph.consumers import is_exact
from jaxamp.plan.graph.graph import Graph, Node


def narrow_values(
    graph: Graph,
    regions: FusionRegions,
    node: Node,
    stored: Sequence[Precision | None],
    low: Precision,
) -> set[int]:
    """Return a node's results, its narrow operands, and what these were moved from.

    They can be narrow at no loss of accuracy. Empty if the node rounds.
    """
    read: set[int] = set()
    for value in node.ins:
        if not graph.is_float32[value] or fits(graph.constants.get(value), low):
            continue
        if stored[value] is not low or not _is_exact(graph, value, node, low):
            return set()
        path = _read_once(graph, value)
        if not path:
            return set()
        read.update(path)
    is_far = any(regions.is_far(v, r) for v in node.outs for r in graph.readers[v])
    return {*read, *node.outs} if read and not is_far else set()


def _read_once(graph: Graph, value: int) -> list[int]:
    """Return a value and what it was moved from, if nothing else reads any of it.

    With several readers, cotangents would be summed only after they are rounded.
    """
    path: list[int] = []
    while True:
        is_taken = any(value in taken for taken in (graph.outputs, graph.onward, graph.ruled))
        if len(graph.readers[value]) != 1 or is_taken:
            return []
        path.append(value)
        source = graph.moved_from.get(value)
        if source is None:
            return path
        if graph.sizes[source] != graph.sizes[value]:
            return []
        value = source


def fits(number: float | None, low: Precision) -> bool:
    """Return whether a narrow format represents a known number exactly."""
    if number is None or low.max < abs(number) < np.inf:
        return False
    return number != number or float(np.asarray(number, low.dtype)) == number


def factor(graph: Graph, value: int, reader: Node) -> float | None:
    """Return the known number that a node multiplies a value by, if it does nothing else."""
    if reader.name not in ("mul", "div"):
        return None
    others = [graph.constants.get(v) for v in reader.ins if v != value]
    if len(others) != 1 or others[0] is None:
        return None
    if reader.name == "mul":
        return others[0]
    is_quotient = reader.name == "div" and reader.ins[0] == value and others[0] != 0
    return 1 / others[0] if is_quotient else None


def _is_exact(graph: Graph, value: int, node: Node, low: Precision) -> bool:
    if is_exact(node):
        return True
    # A power of two changes the exponent alone, of which float16 has fewer bits.
    scale = factor(graph, value, node) if low is Precision.BF16 else None
    return scale is not None and abs(math.frexp(scale)[0]) == 0.5
