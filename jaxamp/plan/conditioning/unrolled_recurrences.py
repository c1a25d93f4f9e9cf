"""Find recurrences that are unrolled in Python, whose state is no carry of a loop.

`for x in xs: h = z * h + (1 - z) * jnp.tanh(x @ w + h @ u)`: sums, each linear in the one before,
to which products by the same arrays add, or that products read one by one, as in linear attention:
`s = z * s + k * v; y = s @ q`. A few iterations round like a few layers; after many, the increment
may be smaller than a rounding of the sum. A residual stream is no recurrence: between two of its
sums is a matrix that multiplies little else. Nor is `h = a[t] @ h + b[t]`: a product rounds it all.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.consumers import ADDS
from jaxamp.plan.graph.graph import Graph, Node, Role
from jaxamp.plan.graph.sweeps import mark, union

LinearPath = list[tuple[Node, int]]

_ITERATIONS = 8  # fewer round as a network of few layers does


def find_unrolled_recurrences(graph: Graph, provenance: Provenance) -> LinearPath:
    """Return the nodes that make a recurrent sum from the previous one, each with that operand."""
    sums = _find_sums(graph, provenance)
    found, path = [], set[int]()
    for node in reversed(graph.nodes):
        is_sum = node.name in ADDS and node.outs[0] in sums
        if is_sum and sums[node.outs[0]].iteration >= _ITERATIONS:
            path.update(node.outs)
        if path.isdisjoint(node.outs):
            continue
        for value in dict.fromkeys(node.ins):
            if value in sums and node.is_linear_in(value):
                found.append((node, value))
                path.add(value)
    return found


def _find_products(graph: Graph, provenance: Provenance) -> tuple[set[Node], dict[Node, list[int]]]:
    """Return contractions by an array that many others multiply by alike, and other ones.

    Those multiply an activation, each by arrays of its own, perhaps again where it is recomputed or
    of another input. Equal slices of one array are the same.
    """
    origins: dict[int, int] = {}
    slices: dict[tuple[Any, ...], int] = {}
    pairs = []
    for node in graph.nodes:
        if node.role is Role.CONTRACT and len(node.ins) > 1:  # user-registered ones may have one
            numbers = node.eqn.params.get("dimension_numbers")
            for data, by in (node.ins[:2], node.ins[1::-1]):
                how = origins.get(by, by), by == node.ins[1], numbers
                pairs.append((node, data, by, how))
        for source, out in node.moves if node.role is Role.MOVE else ():
            origin = origins.get(source, source)
            if graph.sizes[source] == graph.sizes[out]:
                origins[out] = origin
            elif node.name == "slice":
                params = node.eqn.params
                place = origin, params["start_indices"], params["limit_indices"], params["strides"]
                origins[out] = slices.setdefault(place, out)
    readers = Counter(how for *_, how in pairs)
    repeated = {node for node, *_, how in pairs if readers[how] >= _ITERATIONS}
    own: dict[Node, list[int]] = {}
    for node, data, by, how in pairs:
        if readers[how] < _ITERATIONS and provenance.dense[data]:
            own.setdefault(node, []).append(by)
    return repeated, own


class _Sum(NamedTuple):
    """Latest sum that a value is linear in."""

    iteration: int
    depth: int  # repeated products before it
    place: int  # its node's
    is_read: bool  # by a product


def _find_sums(graph: Graph, provenance: Provenance) -> dict[int, _Sum]:
    """Return, per value, the sum that it is linear in, by a sweep that counts iterations.

    A product by an array of its own that is made of no sum, as a parameter is, is a layer.
    """
    count, dense = len(graph.avals), provenance.dense
    repeated, own = _find_products(graph, provenance)
    adds = (n for name in ADDS for n in graph.named.get(name, ()))
    added = {n for n in adds if sum([dense[v] for v in n.ins]) > 1}
    read = _find_read(graph, added)
    depths = [0] * count  # repeated products on the longest path to each value
    latest = [0] * count  # the place of the last sum on a path to it
    before_layer = [0] * count  # and of the last one that a layer reads
    sums: dict[int, _Sum] = {}
    for node in graph.nodes:
        depth = last = crossed = 0
        for v in node.ins:  # `max` takes four times as long
            if depths[v] > depth:
                depth = depths[v]
            if latest[v] > last:
                last = latest[v]
            if before_layer[v] > crossed:
                crossed = before_layer[v]
        is_layer = node in own and not all(latest[v] for v in own[node])
        read_sums = [v for v in node.ins if v in sums] if node.role is not Role.REDUCE else ()
        linear = [sums[v] for v in read_sums if node.is_linear_in(v)]
        if node in added:
            made = _Sum(1, depth, node.index, bool(read[node.outs[0]]))
            linear = [_next(before, crossed, made) for before in linear] or [made]
        for out in node.outs:
            depths[out] = depth + (node in repeated)
            latest[out] = node.index if node in added else last
            before_layer[out] = last if is_layer else crossed
            if linear:
                sums[out] = max(linear)
    return sums


def _next(before: _Sum, crossed: int, made: _Sum) -> _Sum:
    """Return a sum that continues another.

    It is of a new iteration if a product is in between, or reads the other one. With a layer in
    between it is none of the same recurrence.
    """
    if not (before.is_read or before.depth < made.depth):
        return made._replace(iteration=before.iteration)
    return made._replace(iteration=before.iteration + 1) if crossed < before.place else made


def _find_read(graph: Graph, added: set[Node]) -> bytearray:
    """Mark values that a product reads, after no other sum."""
    read = bytearray(len(graph.avals))
    for node in reversed(graph.nodes):
        passes = node.role not in (Role.FIXED, Role.LINK) and node not in added
        if node.role is Role.CONTRACT or (passes and union(read, node.outs)):
            mark(read, node.ins, 1)
    return read
