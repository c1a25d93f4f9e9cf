"""Find values that are stored though they could be fused, as recomputing them costs more.

A value computed from several stored activations, or by an exponential or the like, is stored once
in any case: for a later kernel, or for a reader that waits for a reduction over its rows. Stored
narrow, it takes half of the bytes that XLA would store. So is what a norm reads or makes, where
others read it that the norm's kernel cannot hold; and the sum of a convolution and a bias, or a
time embedding, before a norm of each image: XLA does not recompute arithmetic for reductions that
keep both the major and the minor axes. A bias is narrow before this and before all but other norms:
where both summands are, the convolution's own kernel adds it, and a ReLU.
"""

from __future__ import annotations

from typing import Any

from jaxamp.plan.dataflow.dataflow import Dataflow
from jaxamp.plan.dataflow.linearity import LINEAR, Linearity
from jaxamp.plan.dataflow.lookups import is_looked_up_again
from jaxamp.plan.dataflow.provenance import DENSE, STATISTIC, Provenance
from jaxamp.plan.dataflow.regions import ARITHMETIC, COSTLY, reduces_rows
from jaxamp.plan.graph.consumers import ADDS, descendants, is_movement, is_square, read_for_results
from jaxamp.plan.graph.graph import Graph, Node, Role, is_smaller
from jaxamp.plan.graph.sweeps import mark, union

_NONE, _SEVERAL, _ROWS = -1, -2, -3
_MOST_DEFERRED = 8  # arrays that are kept for one kernel: more than it recomputes are too many


def store_joins(flow: Dataflow, linearity: Linearity) -> None:
    """Take values out of `regions.fused`, and fill in `regions.joined`."""
    joins = _Joins(flow, linearity)
    for node in flow.graph.nodes:
        if node.role in ARITHMETIC:
            joins.visit(node)
        elif node.role is Role.REDUCE and reduces_rows(flow.graph, node):
            mark(joins.normalized, node.outs, 1)


class _Joins:
    """Forward sweep over values computed from several stored activations."""

    def __init__(self, flow: Dataflow, linearity: Linearity) -> None:
        self.graph, self.provenance, _, self.regions = flow
        self.made = linearity.made
        # Joins that are stored rather than several values computed from them.
        self.shared = _find_shared(flow, self.made)
        count, dense = len(self.graph.avals), self.provenance.dense
        # Per value, the large stored activation that it is computed from, `_NONE` or `_SEVERAL`;
        # `_ROWS` of tables, whichever they are, which later kernels look up again.
        self.computed_from = [v if is_dense else _NONE for v, is_dense in enumerate(dense)]
        for node in self.graph.named.get("gather", ()):
            if is_looked_up_again(self.graph, self.provenance, node):
                self.computed_from[node.outs[0]] = _ROWS
        self.mixed = bytearray(count)  # others are combined with that, however small
        self.costly = bytearray(count)  # a costly operation lies between that and the value
        self.normalized = bytearray(count)  # sums over its rows belong to the value's kernel
        self.deferred: dict[int, int] = {}  # per value left to a later kernel, how many that reads

    def visit(self, node: Node) -> None:
        """Decide for the results of arithmetic."""
        norms = [v for v in node.ins if self.normalized[v]]
        if norms and not all(self.regions.is_far(v, node) for v in norms):
            mark(self.normalized, node.outs, 1)
        dense = self.provenance.dense
        is_joined = union(dense, node.outs) and not self.regions.kernels[node.index]
        for value, parts in read_for_results(node) if is_joined else ():
            if dense[value]:
                self._enter(node, value, parts)

    def _enter(self, node: Node, value: int, parts: tuple[int, ...]) -> None:
        joined = value if _overlaps(self.graph, node) else self._join(value, parts)
        self.regions.joined[value] = joined == _SEVERAL
        if self.graph.kinds[value] == "b":  # masks are recomputed where they are read
            self.computed_from[value] = joined
        if not self.regions.fused[value]:
            return
        is_costly = node.trait in COSTLY or union(self.costly, parts)
        is_mixed = (
            union(self.mixed, parts) or len({self.computed_from[v] for v in parts} - {_NONE}) > 1
        )
        is_joined = joined == _SEVERAL or bool(is_costly and is_mixed)
        is_summed = is_costly and self._is_summed(value)
        if (is_joined and is_summed) or self._is_stored(value, is_joined, bool(is_costly), parts):
            self._store(value)
            joined = value
        self.computed_from[value] = joined
        self.mixed[value] = is_mixed and joined != value
        self.costly[value] = is_costly and joined != value

    def _store(self, value: int) -> None:
        """Store a value, and what is only moved to be it: arithmetic rounds, and not a move."""
        self.regions.fused[value] = self.normalized[value] = 0
        graph, source = self.graph, self.graph.moved_from.get(value, value)
        is_whole = source != value and graph.sizes[source] == graph.sizes[value]
        if is_whole and len(graph.readers[source]) == 1:
            self._store(source)

    def _join(self, value: int, parts: tuple[int, ...]) -> int:
        """Return the one large activation that a value is computed from, or `_SEVERAL`."""
        computed_from = {self.computed_from[v] for v in parts}
        found = {p for p in computed_from if p < 0 or _is_large(self.graph, p, value)} - {_NONE}
        return _NONE if not found else found.pop() if len(found) == 1 else _SEVERAL

    def _is_stored(
        self, value: int, is_joined: bool, is_costly: bool, parts: tuple[int, ...]
    ) -> bool:
        graph, readers = self.graph, self.graph.readers[value]
        if self._is_beside_row_sums(value) or (is_joined and value in self.shared):
            return True
        if is_joined and any(self._takes_later(value, r) for r in readers):
            return is_costly or not self._is_deferred(value, parts)
        if is_costly and self._is_split(value, is_joined=is_joined):
            return True
        if not is_joined and (not is_costly or self._is_normalized(value)):
            return False
        reductions = (r for r in readers if r.role is Role.REDUCE and not reduces_rows(graph, r))
        # A window's sum is a kernel of its own, which reads costly values in f32.
        reduced = any(is_joined or not self.regions.kernels[r.index] for r in reductions)
        return reduced and any(r.role is Role.ELEMENTWISE for r in readers)

    def _is_deferred(self, value: int, parts: tuple[int, ...]) -> bool:
        """Return whether the one later kernel that reads a value computes it from its parts.

        It reads them in place of the value, which is neither written nor read then: the skip
        connections of many layers are added up once, at the end.
        """
        graph, deferred, readers = self.graph, self.deferred, self.graph.readers[value]
        if len(readers) != 1 or readers[0].role is not Role.ELEMENTWISE:
            return False
        read = {v if v in deferred else self.computed_from[v] for v in parts} - {_NONE}
        count = sum(deferred.get(v, 1) for v in read)
        is_whole = all(v >= 0 and graph.sizes[v] == graph.sizes[value] for v in read)
        if is_whole and count <= _MOST_DEFERRED:
            deferred[value] = count
        return value in deferred

    def _is_beside_row_sums(self, value: int) -> bool:
        """Return whether a norm's kernel ends at a value, or begins there, and others read it too.

        What sums rows is no part of a window's or a scatter's kernel. Several later kernels would
        take the sums again, each of them, and each a sum of its part of the cotangent. What only
        multiplies the value later is the norm's own backward pass.
        """
        graph, regions = self.graph, self.regions
        readers = graph.readers[value]
        later = [r for r in readers if regions.is_far(value, r)]
        if self.normalized[value]:
            windows = (r for r in readers if r.role is Role.REDUCE and regions.kernels[r.index])
            return any(windows) or len(later) == len(readers) > 1
        if not any(r.name in ADDS for r in later):
            return False
        squares = [s for r in readers if is_square(r) for v in r.outs for s in graph.readers[v]]
        return any(_sums_rows(graph, r) for r in (*readers, *squares) if r not in later)

    def _is_summed(self, value: int) -> bool:
        """Return whether products of a value are summed: squares, or products over many rows.

        So are what is gated before a norm, and a cotangent of what parameters multiply.
        """
        graph = self.graph
        products = [r for r in graph.readers[value] if r.name == "mul" or is_square(r)]
        sums = [(p, r) for p in products for v in p.outs for r in graph.readers[v]]
        return any(
            r.role is Role.REDUCE and (is_square(p) or not reduces_rows(graph, r)) for p, r in sums
        )

    def _takes_later(self, value: int, reader: Node) -> bool:
        """Return whether a later kernel reads a value, or what one of several readers moves it to.

        Mapped functions transpose a cotangent for a product, beside its sum. Each would compute it.
        """
        graph, is_far = self.graph, self.regions.is_far
        if is_far(value, reader):
            return True
        if reader.role is not Role.MOVE or len(graph.readers[value]) == 1:
            return False
        moved = [v for v in reader.outs if graph.sizes[v] == graph.sizes[value]]
        return any(is_far(v, r) for v in moved for r in graph.readers[v])

    def _is_split(self, value: int, *, is_joined: bool) -> bool:
        """Return whether several parts of a value are read: each is a kernel, and would compute it.

        So are states, keys and inputs of a recurrence, of which one filter makes all. What is made
        of one array is stored for parts of which one waits, as a gate does for a mixture of tokens.
        """
        graph, is_far = self.graph, self.regions.is_far
        moved = [v for r in graph.readers[value] if r.role is Role.MOVE for v in r.outs]
        parts = [v for v in moved if is_smaller(graph.sizes[v], graph.sizes[value])]
        if len(parts) < 2:
            return False
        return is_joined or any(is_far(v, r) for v in parts for r in graph.readers[v])

    def _is_normalized(self, value: int) -> bool:
        """Return whether a value is combined with its own statistic, which magnifies roundings.

        Those of a residual stream are as large as a product's own. Channel weights, as of
        squeeze-and-excitation, come through contractions and are activations.
        """
        if self.made[value] & LINEAR:
            return False
        bits, readers = self.provenance.bits, self.graph.readers[value]
        read = (v for r in readers if r.role is Role.ELEMENTWISE for v in r.ins)
        return any(bits[v] & (STATISTIC | DENSE) == STATISTIC for v in read)


def _find_shared(flow: Dataflow, made: bytearray) -> set[int]:
    """Return joins that are stored for what is computed from them alone.

    They are smaller than all that later kernels read of that: a norm of a sum reads the sum three
    times, and once more in the backward pass. Or a curve is taken of all of a join of a residual
    stream: its derivative then reads that one array in place of several.
    """
    graph, provenance, _, regions = flow
    dense, fused, sizes = provenance.dense, regions.fused, graph.sizes
    root = list(range(len(graph.avals)))  # per fused value, the one join that it is computed from
    later: dict[int, Any] = {}
    whole: dict[int, bool] = {}  # per join, whether it is more than of parts of arrays
    curved: set[int] = set()
    for node in graph.nodes:
        is_found = node.role in ARITHMETIC and union(dense, node.outs)
        for value, parts in read_for_results(node) if is_found else ():
            if not (dense[value] and fused[value]):
                continue
            roots = {root[v] for v in parts if dense[v] and _is_large(graph, v, value)}
            if len(roots) == 1:
                (join,) = roots
                root[value] = join
                if any(regions.is_far(value, r) for r in graph.readers[value]):
                    later[join] = later.get(join, 0) + sizes[value]
                is_stream = whole.get(join, False) and made[join] & LINEAR
                if is_stream and node.trait in COSTLY and not is_smaller(sizes[value], sizes[join]):
                    curved.add(join)
            else:
                double = 2 * sizes[value]
                whole[value] = any(whole.get(v, not is_smaller(double, sizes[v])) for v in roots)
    shared = [v for v, size in later.items() if fused[v] and is_smaller(sizes[v], size)]
    return {_whole_sum(graph, provenance, v) for v in {*shared, *curved}}


def _whole_sum(graph: Graph, provenance: Provenance, value: int) -> int:
    """Return the sum of a value and whatever is added to it alone, such as means over rows."""
    while len(graph.readers[value]) == 1:
        (reader,) = graph.readers[value]
        computed = [provenance.bits[v] & (DENSE | STATISTIC) for v in reader.ins]
        if reader.name not in ADDS or not all(computed):
            break
        (value,) = reader.outs
    return value


def _is_large(graph: Graph, part: int, whole: int) -> bool:
    """Return whether reading `part` costs about as much as reading `whole`."""
    return not is_smaller(2 * graph.sizes[part], graph.sizes[whole])


def _sums_rows(graph: Graph, node: Node) -> bool:
    return node.role is Role.REDUCE and reduces_rows(graph, node)


def _overlaps(graph: Graph, node: Node) -> bool:
    """Return whether a node cuts more than half from an array, so that two such parts overlap.

    Windows of one array that are added up, the taps of a filter, are read like several arrays.
    """
    if node.name != "slice":
        return False
    part, whole = graph.sizes[node.outs[0]], graph.sizes[node.ins[0]]
    return is_smaller(part, whole) and is_smaller(whole, 2 * part)


def store_bias_sums(flow: Dataflow) -> None:
    """Take sums out of `regions.fused`, and fill in `regions.bias_sums`."""
    graph, provenance, _, regions = flow
    for convolution in graph.named.get("conv_general_dilated", ()):
        sums = _sums(graph, convolution)
        if not sums:
            continue
        (first, bias), (last, _) = sums[0], sums[-1]
        moved = descendants(graph, last, is_movement)
        reductions = [r for v in moved for r in graph.readers[v] if r.name == "reduce_sum"]
        if any(_keeps_both_ends(graph, r) for r in reductions):
            regions.fused[last] = 0
        elif reductions:  # in the kernels of other norms the bias is added in float32
            continue
        if not provenance.dense[bias]:
            regions.fused[first] = 0
            regions.bias_sums.add(first)


def _sums(graph: Graph, convolution: Node) -> list[tuple[int, int]]:
    """Return the sums, read once, that begin with a convolution, each with what is broadcast."""
    (value,) = convolution.outs
    sums: list[tuple[int, int]] = []
    while len(graph.readers[value]) == 1 and value not in graph.outputs:
        (reader,) = graph.readers[value]
        others = [v for v in reader.ins if v != value]
        if reader.name != "add" or len(others) != 1:
            break
        small = graph.origin(others[0])
        if not is_smaller(graph.sizes[small], graph.sizes[value]):
            break
        (value,) = reader.outs
        sums.append((value, small))
    return sums


def _keeps_both_ends(graph: Graph, node: Node) -> bool:
    """Return whether a sum keeps the major axis, and reduces more than the minor one."""
    axes = node.eqn.params["axes"]
    return 0 not in axes and min(axes) < graph.avals[node.ins[0]].ndim - 2
