"""Find where the numbers of each value lie: an interval, and whether they are whole.

`1 + abs(x)` stays away from zero, `symexp(jnp.linspace(-20, 20, 255))` exceeds float16, and indices
made floats are whole numbers, of which bfloat16 has few. What single primitives do to intervals is
in `core/taxonomy.py`. A loop carry may be anywhere: no interval grows from turn to turn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numpy as np

from jaxamp.core.intervals import ANYWHERE, NONNEGATIVE, Interval, hull, squared
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.graph.graph import Graph, Link, Node, Role

_MASK = Interval(0.0, 1.0)
NEVER = Interval(0.0, 0.0)
_MANY = Interval(1.0, math.inf)
_REDUCTIONS = (Trait.SUM, Trait.ALLREDUCE, Trait.PREFIX, Trait.PRODUCT, Trait.EXTREMUM)
_AROUND = (Link.INIT, Link.BACK, Link.RESULT)


def find_ranges(graph: Graph) -> None:
    """Enter the ranges of all values into the graph, and which of them are whole numbers."""
    graph.ranges = [ANYWHERE] * len(graph.avals)
    graph.whole = bytearray([kind in "iub" for kind in graph.kinds])
    for value in itertools.compress(range(len(graph.avals)), graph.whole):
        graph.ranges[value] = _of_dtype(graph, value)
    for value, number in graph.constants.items():
        if value not in graph.sources and number == number:
            graph.ranges[value] = Interval(number, number)
            graph.whole[value] |= math.isfinite(number) and number == int(number)
    for value, interval in graph.extents.items():
        graph.ranges[value] = interval
    for node in graph.nodes:
        _TRANSFER[node.role](graph, node)


def _of_dtype(graph: Graph, value: int) -> Interval:
    kind = graph.kinds[value]
    if kind == "b":
        return _MASK
    dtype = graph.avals[value].dtype
    if dtype.itemsize > 1:
        return NONNEGATIVE if kind == "u" else ANYWHERE
    limits = np.iinfo(dtype)
    return Interval(float(limits.min), float(limits.max))


def _set(graph: Graph, value: int, interval: Interval, whole: bool) -> None:
    if graph.kinds[value] in "iub":
        limits, whole = graph.ranges[value], True  # of its dtype
        if interval.low > limits.high or interval.high < limits.low:
            interval = limits  # it has wrapped around
        interval = Interval(
            max(float(np.floor(interval.low)), limits.low),
            min(float(np.ceil(interval.high)), limits.high),
        )
    graph.ranges[value], graph.whole[value] = interval, whole


def _contract(graph: Graph, node: Node) -> None:
    is_nonnegative = all(graph.ranges[v].low >= 0 for v in node.ins)
    interval = NONNEGATIVE if is_nonnegative else ANYWHERE
    for out in node.outs:
        _set(graph, out, interval, _all_whole(graph, node.ins))


def _elementwise(graph: Graph, node: Node) -> None:
    facts = node.semantics
    known = [graph.ranges[v] for v in node.ins]
    if node.name == "integer_pow":
        power = float(node.eqn.params["y"])
        known.append(Interval(power, power))
    (out,) = node.outs
    if node.trait in _REDUCTIONS and len(node.ins) == 1:
        interval = known[0]  # a reduction of no axis
    elif node.name == "mul" and node.ins[0] == node.ins[1]:
        interval = squared(known[0])
    elif node.name == "ne" and node.ins[0] == node.ins[1]:
        interval = NEVER  # but where a number is NaN
    elif node.name == "eq" and math.isinf(graph.constants.get(node.ins[1], 0.0)):
        interval = NEVER  # but where one is infinite
    else:
        interval = facts.range(*known)
    chosen = node.ins[1:] if node.name == "select_n" else node.ins
    is_whole = facts.whole and node.eqn.params.get("y", 1) >= 0 and _all_whole(graph, chosen)
    _set(graph, out, interval, node.trait is Trait.INTEGRAL or is_whole)


def _reduce(graph: Graph, node: Node) -> None:
    facts = node.semantics
    for source, out in node.moves:
        if len(node.ins) > 1 and len(node.outs) == 1:  # an array, and what is scattered into it
            interval, whole = facts.range(*(graph.ranges[v] for v in node.ins)), node.ins
        else:
            interval, whole = facts.range(graph.ranges[source], _terms(graph, node)), (source,)
        if graph.kinds[out] in "iu" and graph.kinds[source] not in "iu":
            interval = NONNEGATIVE  # the place of an extremum
        _set(graph, out, interval, facts.whole and _all_whole(graph, whole))


def _terms(graph: Graph, node: Node) -> Interval:
    """Return how many numbers a reduction makes one of."""
    if node.name == "reduce_sum":
        whole, part = graph.sizes[node.ins[0]], graph.sizes[node.outs[0]]
        if isinstance(whole, int) and isinstance(part, int) and part:
            return Interval(whole / part, whole / part)
    return _MANY


def _move(graph: Graph, node: Node) -> None:
    for source, out in node.moves:
        _set(graph, out, graph.ranges[source], bool(graph.whole[source]))


def _merge(graph: Graph, node: Node) -> None:
    (out,) = node.outs
    alike = [v for v in node.ins if graph.kinds[v] == graph.kinds[out]]
    _join(graph, alike or node.ins, out)


def _link(graph: Graph, node: Node) -> None:
    if node.link not in _AROUND:
        _join(graph, node.ins, node.outs[0])


def _fixed(graph: Graph, node: Node) -> None:
    if node.name == "iota":
        size = graph.avals[node.outs[0]].shape[node.eqn.params["dimension"]]
        last = float(max(size - 1, 0)) if isinstance(size, int) else math.inf
        _set(graph, node.outs[0], Interval(0.0, last), True)


def _join(graph: Graph, parts: Iterable[int], out: int) -> None:
    parts = list(parts)
    _set(graph, out, hull(*(graph.ranges[v] for v in parts)), _all_whole(graph, parts))


def _all_whole(graph: Graph, values: Iterable[int]) -> bool:
    return all(map(graph.whole.__getitem__, values))


_TRANSFER = {
    Role.CONTRACT: _contract,
    Role.REDUCE: _reduce,
    Role.ELEMENTWISE: _elementwise,
    Role.MOVE: _move,
    Role.CONVERT: _move,
    Role.MERGE: _merge,
    Role.FIXED: _fixed,
    Role.LINK: _link,
}
