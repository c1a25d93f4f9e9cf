"""Find gathers: lookups in tables, their transposes, and gathers from activations.

A lookup is a product of its table with one-hot rows. What it finds is an activation; what the
scatter adds up are cotangents of one, and what it returns is a gradient. Of a table that is split
over devices each has its own rows: they add up one row and zeros, which rounds the row and nothing
more.

A cross-entropy reads its logits twice, whole and at the labels, and where the model is right the
two cotangents nearly cancel. They have to be added before either is rounded: the gather joins the
fused group of the other readers. Its result, one number per row, is small.

What is read many times, as messages in a graph network are, is read from memory. Each reading has a
cotangent: summed in a narrow format, a long sum stops growing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Set

from jaxamp.core.intervals import magnitude
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.provenance import DENSE, STATISTIC, Provenance
from jaxamp.plan.graph.consumers import descendants
from jaxamp.plan.graph.graph import Graph, Node, Role, is_smaller


def is_label_gather(graph: Graph, provenance: Provenance, node: Node) -> bool:
    """Return whether a node gathers single numbers of an activation, at most half of them."""
    if node.name != "gather" or set(node.eqn.params["slice_sizes"]) != {1}:
        return False
    (found,), table = node.outs, node.ins[0]
    is_half = is_smaller(2 * graph.sizes[found], graph.sizes[table] + 1)
    return is_half and bool(provenance.dense[table])


def gathers_whole_table(graph: Graph, node: Node) -> bool:
    """Return whether a gather takes the whole table as one slice: `x[:, 0]` of one column."""
    if node.name != "gather":
        return False
    size = graph.sizes[node.ins[0]]
    return math.prod(node.eqn.params["slice_sizes"]) == graph.sizes[node.outs[0]] == size


def is_repeated_gather(graph: Graph, node: Node) -> bool:
    """Return whether a gather's result is no smaller than its table: too costly to fuse."""
    if node.name != "gather" or gathers_whole_table(graph, node):
        return False
    table, found = graph.sizes[node.ins[0]], graph.sizes[node.outs[0]]
    return table != 1 and not is_smaller(found, table)


def is_looked_up_again(graph: Graph, provenance: Provenance, node: Node) -> bool:
    """Return whether arithmetic reads rows of an activation: each of its kernels looks them up."""
    if not is_repeated_gather(graph, node) or not provenance.dense[node.outs[0]]:
        return False
    return any(reader.role is Role.ELEMENTWISE for reader in graph.readers[node.outs[0]])


def find_sums_of_cotangents(graph: Graph) -> tuple[frozenset[Node], frozenset[Node]]:
    """Return gathers that may read one number often, and scatters that transpose the others.

    Where `amp(f)` is differentiated, the transpose of a gather adds up cotangents in the format
    that it moves: of many in float32, else as it is stored. A scatter into zeros does the same.
    """
    gathers = graph.named.get("gather", ())
    permutations = _find_permutations(graph) if gathers else set[int]()
    many = frozenset(n for n in gathers if _reads_often(graph, n, permutations))
    places = {(n.ins[1], graph.sizes[n.ins[0]]) for n in gathers if n not in many}
    few = frozenset(
        node
        for node in graph.named.get("scatter-add", ())
        if graph.constants.get(node.ins[0]) == 0
        if (node.ins[1], graph.sizes[node.outs[0]]) in places
    )
    return many, few


def _reads_often(graph: Graph, node: Node, permutations: Set[int]) -> bool:
    params = node.eqn.params
    if params["unique_indices"] or not is_repeated_gather(graph, node):
        return False
    axes = params["dimension_numbers"].start_index_map
    is_row = len(axes) == 1 and params["slice_sizes"][axes[0]] == 1
    return not (is_row and node.ins[1] in permutations)


def _find_permutations(graph: Graph) -> set[int]:
    """Return what `argsort` makes, the numbers of an iota, sorted; indices may wrap after it."""
    iotas = {v for n in graph.named.get("iota", ()) for v in n.outs if graph.avals[v].ndim == 1}
    signs = graph.named.get("lt", ())
    negative = {(n.outs[0], n.ins[0]) for n in signs if graph.constants.get(n.ins[1]) == 0}
    found = set[int]()
    for node in graph.nodes if "sort" in graph.named else ():
        if node.name == "sort":
            found.update(out for v, out in node.moves if v in found or v in iotas)
        elif node.role is Role.MOVE and node.name != "gather":
            whole = [(v, out) for v, out in node.moves if graph.sizes[v] == graph.sizes[out]]
            found.update(out for v, out in whole if v in found)
        elif node.name == "select_n" and node.ins[1] in found and node.ins[:2] in negative:
            found.update(node.outs)
    return found


def is_lookup(graph: Graph, provenance: Provenance, node: Node) -> bool:
    """Return whether a node gathers rows of a boundary value, by computed indices."""
    is_gather = node.name == "gather" and any(v not in graph.constants for v in node.ins[1:])
    return is_gather and not provenance.dense[node.ins[0]]


def find_split_lookups(
    graph: Graph, provenance: Provenance, *, if_unknown: bool
) -> dict[Node, bool]:
    """Return the lookups in tables whose rows lie on several devices, or may; whether they do.

    Each device finds its own rows, and all of them are added up. Under Explicit axes a lookup leads
    to Auto ones and back: the type that a table is resharded from says where its rows lie. Tables
    of which no type says anything, as under Auto axes, count `if_unknown`, and in a program that
    says how devices part its arrays.
    """
    if_unknown = if_unknown or _is_partitioned(graph)
    before = {node.outs[0]: node.ins[0] for node in graph.named.get("reshard", ())}
    found: dict[Node, bool] = {}
    for node in graph.named.get("gather", ()):
        if is_lookup(graph, provenance, node):
            tables = [node.ins[0]]
            while tables[-1] in before:
                tables.append(before[tables[-1]])
            is_known = any(_has_axes(graph, table) for table in tables)
            is_split = any(_is_split(graph, node, t) for t in tables)
            if is_split or (if_unknown and not is_known):
                found[node] = is_split
    return found


def is_subtracted(graph: Graph, provenance: Provenance, value: int) -> bool:
    """Return whether a value is part of a difference before Compute, as of two points.

    The other part is no activation, whose rounding is as large, and no mean, as in a norm.
    """
    known = provenance.bits
    return any(
        reader.name == "sub" and not any(known[v] & (DENSE | STATISTIC) for v in reader.ins)
        for v in descendants(graph, value, operator.attrgetter("is_elementwise"))
        for reader in graph.readers[v]
    )


def _is_partitioned(graph: Graph) -> bool:
    """Return whether a program constrains in which parts an array lies on several devices."""
    constraints = graph.named.get("sharding_constraint", ())
    return any(node.eqn.params["sharding"].num_devices > 1 for node in constraints)


def _has_axes(graph: Graph, value: int) -> bool:
    """Return whether a value's type has axes of which it says whether they split it."""
    mesh = getattr(getattr(graph.avals[value], "sharding", None), "mesh", None)
    return mesh is not None and not (mesh.empty or mesh.are_all_axes_auto)


def _is_split(graph: Graph, node: Node, table: int) -> bool:
    sharding = getattr(graph.avals[table], "sharding", None)
    split = () if sharding is None else sharding.spec.partitions
    axes = node.eqn.params["dimension_numbers"].start_index_map
    return any(split[axis] is not None for axis in axes if axis < len(split))


def find_looked_up(graph: Graph, provenance: Provenance) -> frozenset[int]:
    """Return the values that are computed from rows of a table."""
    found = set[int]()
    for node in graph.nodes:
        if is_lookup(graph, provenance, node) or not found.isdisjoint(node.ins):
            found.update(node.outs)
    return frozenset(found)


def find_transposed_lookups(graph: Graph, provenance: Provenance, reaches: bytes) -> list[int]:
    """Return cotangents of rows that Compute reads, which a scatter adds up at their places."""
    scatters = graph.named.get("scatter-add", ())
    gathers = graph.named.get("gather", ()) if scatters else ()
    read = [n for n in gathers if reaches[n.outs[0]] and is_lookup(graph, provenance, n)]
    places, zeros = {n.ins[1] for n in read}, graph.constants
    return [n.ins[2] for n in scatters if n.ins[1] in places and zeros.get(n.ins[0]) == 0]


def find_masked_lookups(graph: Graph, provenance: Provenance) -> frozenset[int]:
    """Return the values that are rows of a boundary value, or zeros where a mask says so.

    Empty where nothing is added up over devices.
    """
    if not any(node.trait is Trait.ALLREDUCE for node in graph.nodes):
        return frozenset()
    rows, masked = set[int](), set[int]()
    for node in graph.nodes:
        if is_lookup(graph, provenance, node):
            rows.update(node.outs)
            masked.update(node.outs if node.eqn.params["fill_value"] == 0 else ())
        elif node.role is Role.MOVE:
            for found in (rows, masked):
                found.update([out for source, out in node.moves if source in found])
        elif not rows.isdisjoint(_masked(graph, node)):
            rows.update(node.outs)
            masked.update(node.outs)
    return frozenset(masked)


def _masked(graph: Graph, node: Node) -> Iterator[int]:
    """Yield the operand of which a node leaves what a mask says, and zeros elsewhere."""
    if node.name == "select_n":
        kept = [v for v in node.ins[1:] if graph.constants.get(v) != 0]
        yield from kept if len(kept) == 1 else ()
    elif node.name == "mul":
        for value, mask in (node.ins, node.ins[::-1]):
            if graph.whole[mask] and magnitude(graph.ranges[mask]).high <= 1:
                yield value
