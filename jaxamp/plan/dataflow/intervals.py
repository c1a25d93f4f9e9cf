"""Bound arrays that are computed from known numbers alone.

`symexp(jnp.linspace(-20, 20, 255))`, the bins of a distributional value: a contraction would round
them, and most overflow float16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from jaxamp.core.semantics import semantics_of
from jaxamp.plan.graph.graph import Graph, Node, Role, movements

Interval = tuple[float, float]

_PAIRS: Mapping[str, Callable[[float, float], float]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "pow": lambda x, y: x**y,
    "max": max,
    "min": min,
}


def find_intervals(graph: Graph) -> dict[int, Interval]:
    """Return intervals of values computed from literals and iotas; loop carries have none."""
    intervals: dict[int, Interval] = {
        v: (number, number) for v, number in graph.constants.items() if v not in graph.sources
    }
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            if node.name == "iota":
                size = graph.avals[node.outs[0]].shape[node.eqn.params["dimension"]]
                if isinstance(size, int):
                    intervals[node.outs[0]] = 0.0, float(max(size - 1, 0))
            elif node.ins and node.ins[-1] in intervals:
                _enter(intervals, node)
    return intervals


def _enter(intervals: dict[int, Interval], node: Node) -> None:
    if node.role is Role.MOVE or node.role is Role.CONVERT:
        found = {out: intervals[v] for v, out in movements(node) if v in intervals}
        intervals.update(found)
        return
    chosen = node.ins[1:] if node.name == "select_n" else node.ins
    known = [intervals[v] for v in chosen if v in intervals]
    if len(known) < len(chosen) or len(node.outs) != 1:
        return
    interval = _union(known) if node.role is Role.MERGE else _of(node, known)
    if interval is not None and not any(map(math.isnan, interval)):
        intervals[node.outs[0]] = interval


def _of(node: Node, known: Sequence[Interval]) -> Interval | None:
    if node.name == "select_n":
        return _union(known)
    if node.name == "abs":
        ends = [abs(x) for x in known[0]]
        return (0.0 if known[0][0] < 0 < known[0][1] else min(ends)), max(ends)
    if curve := semantics_of(node.name, node.op).monotone:
        return _around(float(curve(x)) for x in known[0])
    pair = _PAIRS.get(node.name)
    if pair is None or (node.name in ("div", "pow") and not _is_apart(node, known)):
        return None
    return _around(float(pair(np.float64(x), np.float64(y))) for x in known[0] for y in known[1])


def _is_apart(node: Node, known: Sequence[Interval]) -> bool:
    """Return whether the divisor or base is positive."""
    return known[1 if node.name == "div" else 0][0] > 0


def _around(numbers: Iterable[float]) -> Interval:
    ends = list(numbers)
    return min(ends), max(ends)


def _union(known: Sequence[Interval]) -> Interval:
    return min(low for low, _ in known), max(high for _, high in known)
