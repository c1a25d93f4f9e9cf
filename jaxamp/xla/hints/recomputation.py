"""Decide which values of a fused group are residuals, and which are recomputed.

A group is emitted as one unit, under a checkpoint: the backward pass reads the values that the plan
stores, and recomputes the float32 insides from them, in the kernel that needs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from jaxamp.core.formats import is_narrow
from jaxamp.jaxprs.contracted import multiplies_by_vector
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.dataflow.regions import ARITHMETIC, EQUALITIES, LONGEST_ROW, reduces_rows
from jaxamp.plan.findings import Findings
from jaxamp.plan.graph.consumers import is_square
from jaxamp.plan.graph.graph import Graph, Nest, Node, Role, is_smaller, nodes_of
from jaxamp.plan.graph.sweeps import union
from jaxamp.xla.hints.techniques import Technique


class Recomputation:
    """Residuals and recomputed values of a program's groups."""

    def __init__(self, findings: Findings, techniques: Set[Technique]) -> None:
        groups = findings.groups
        assert groups is not None
        self.graph, self.provenance, _, self.regions = findings.flow
        self.stored, self.exact_narrow = findings.stored, findings.exact_narrow
        self._groups = groups
        relus = self.regions.relu_outputs if Technique.RELU_RESIDUALS in techniques else set[int]()
        self._sole_readings = self._find_sole_readings() if relus else set[int]()
        # Values inside a group that a derivative rule holds and saves; see `regions.py`.
        self.saved_by_rules = set(filter(self._is_saved_by_rule, relus))
        # Values inside a group that are residuals, rather than recomputed: these, and others.
        self.saved = set(self.saved_by_rules)
        # Values that a later group recomputes rather than reads. Results of equality tests are
        # read: what is computed twice may differ in its last bit. So are reductions of what is
        # neither in memory nor recomputed: their operands would be stored for it. And so are sums
        # of rows for later kernels alone, which read the rows for nothing else.
        self.recomputed: set[int] = set()
        joins = Technique.CONCATENATION_PARTS in techniques
        self._side_by_side = self._find_side_by_side() if joins else {}
        self._statistics = (
            find_statistics(self.graph, self.provenance, groups.fusible, groups.levels)
            if Technique.SAVED_STATISTICS in techniques
            else bytearray(len(self.graph.nodes))
        )
        for frame, found in groups.by_frame.items():
            for group in found:
                for index in group:
                    self._enter_site(frame.sites[index])
        if Technique.SHARED_RECOMPUTATION in techniques:
            self._end_chains()
        else:
            self.recomputed.clear()

    def _end_chains(self) -> None:
        """Read from memory what would be recomputed from values of many kernels before.

        Each of the groups along a written-out recurrence would recompute all of it. One kernel
        computes sums of rows one after another, but no more of them than there would be kernels.
        """
        levels, chain, sums = self._groups.levels, dict[int, int](), dict[int, int]()
        for node in self.graph.nodes if self.recomputed else ():
            for value in filter(self.recomputed.__contains__, node.outs):
                further = [chain[v] + (levels[v] < levels[value]) for v in node.ins if v in chain]
                chain[value] = max(further, default=0)  # groups back to memory
                before = max([sums[v] for v in node.ins if v in sums], default=0)
                sums[value] = before + (node.role is Role.REDUCE)  # whether they are stored or not
                least = sums[value] // _LONGEST_CHAIN * _LONGEST_CHAIN
                is_far = least and any(sums[v] < least for v in node.ins if v in self.recomputed)
                if is_far or chain[value] > _LONGEST_CHAIN:
                    self.recomputed.remove(value)
                    del chain[value]

    def _enter_site(self, site: Node | Nest) -> None:
        nodes = nodes_of(site)
        for node in nodes:
            self._enter(node)
        # A call is recomputed as a whole, statistics and all.
        if isinstance(site, Nest) and any(self._statistics[node.index] for node in nodes):
            self.recomputed.difference_update(site.outs)

    def _enter(self, node: Node) -> None:
        """Classify the results of a member of a group."""
        is_statistic = self._statistics[node.index]
        is_found = node.name in EQUALITIES and union(self.provenance.dense, node.ins)
        is_ahead = node in self._groups.ahead
        reads_fused = node.role is Role.REDUCE and any(map(self._is_handed_on, node.ins))
        for value in node.outs:
            if self.graph.is_float32[value]:
                is_saved = is_statistic or self._is_stored(node, value)
                if is_saved and value not in self._side_by_side:
                    self.saved.add(value)
            if not (is_statistic or is_found or is_ahead or reads_fused) and self._is_cheap(value):
                self.recomputed.add(value)

    def _is_cheap(self, value: int) -> bool:
        """Return whether a value is not in memory, and its operands are."""
        if value in self.graph.outputs or self.provenance.state[value]:
            return False
        fusible, in_memory = self._groups.fusible, self.regions.takes_stored
        for reader in self.graph.readers[value]:
            if fusible[reader.index] and in_memory(reader):
                return False  # rows are looked up in it
        if value in self._side_by_side:
            return True
        is_activation = self.graph.is_float32[value] and self.provenance.dense[value]
        is_relu = value in self.regions.relu_outputs and not self.regions.joined[value]
        if is_relu and not self._replaces_a_product(value):
            return True  # its operand is read anyway
        return not is_activation or bool(self.regions.fused[value])

    def _is_handed_on(self, value: int) -> bool:
        """Return whether a later group would read a fused activation rather than recompute it."""
        is_fused = bool(self.regions.fused[value] and self.provenance.dense[value])
        return is_fused and not self._is_cheap(value)

    def _find_side_by_side(self) -> dict[int, int]:
        """Return fused concatenations of arrays in memory, with the number of their parts.

        Reading the parts takes as many bytes as reading the whole, which then need not be written.
        """
        found: dict[int, int] = {}
        for node in self.graph.named.get("concatenate", ()):
            (out,) = node.outs
            parts = sum(found.get(v, 1) for v in node.ins)
            is_stored = all(v in found or self._is_in_memory(v) for v in node.ins)
            is_fused = all(self._groups.fusible[r.index] for r in self.graph.readers[out])
            if parts <= _MOST_PARTS and is_stored and is_fused and is_narrow(self.stored[out]):
                found[out] = parts
        return found

    def _is_in_memory(self, value: int) -> bool:
        """Return whether a narrow activation is stored, whoever reads it."""
        is_stored = is_narrow(self.stored[value]) and value not in self.exact_narrow
        return is_stored and bool(self.provenance.dense[value])

    def _is_saved_by_rule(self, value: int) -> bool:
        """Return whether a rule's ReLU result should be saved: it joins arrays, or replaces one.

        A ReLU of one array that others read too need not be stored on a TPU, which fuses it with
        the convolution that reads it. Nor need one that only vectors multiply: XLA adds up the
        terms in the kernel that computes them.
        """
        if value not in self.graph.ruled_results or not is_narrow(self.stored[value]):
            return False
        return bool(self.regions.joined[value]) or self._replaces_a_product(value)

    def _replaces_a_product(self, value: int) -> bool:
        """Return whether a value alone reads a product, and is in memory in its place."""
        signs = self.regions.sign_tests
        others = (r for r in self.graph.readers[value] if r not in signs)
        is_sole = value in self._sole_readings
        return is_sole and not all(multiplies_by_vector(r.eqn) for r in others)

    def _find_sole_readings(self) -> set[int]:
        """Return products, and sums and ReLUs that alone read them and boundary values."""
        found: set[int] = set()
        for node in self.graph.nodes:
            if node.role is Role.CONTRACT:
                found.update(node.outs)
            elif node.role is Role.MOVE or node.name in ("add", "sub", "max"):
                dense = [v for v in node.ins if self.provenance.dense[v]]
                if [v in found and len(self.graph.readers[v]) == 1 for v in dense] == [True]:
                    found.update(node.outs)
        return found

    def _is_stored(self, node: Node, value: int) -> bool:
        """Return whether a narrow value is in memory for readers at its own level.

        What is only moved for those, and for none later, is moved again.
        """
        if not is_narrow(self.stored[value]) or value in self.exact_narrow:
            return False
        levels = self._groups.levels
        readers = {levels[r.outs[0]] for r in self.graph.readers[value] if r.outs}
        is_computed = node.role is Role.ELEMENTWISE
        return levels[value] in readers and (is_computed or len(readers) > 1)


_MOST_PARTS = 32
"""Parts of a concatenation that is recomputed.

XLA:GPU fuses no more than 96 operands and results: `MaxOperandsAndOutputsPerFusion` in
`xla/service/gpu/gpu_fusible.h`.
"""

_LONGEST_CHAIN = 8
"""Groups and sums of rows that one group recomputes for a value, one after the other.

A bound against square growth: gradients of the benchmarks' models for an H200 have at most 2 groups
and 5 sums, but for DenseNet-121, whose 23 groups are cut (JAX 0.10.2, 29 November 2026).
"""

_FAR = 8  # values between a reduction and memory: a bound on the walk that no model meets


def find_statistics(
    graph: Graph, provenance: Provenance, fusible: bytearray, levels: Sequence[int]
) -> bytearray:
    """Mark, per node, reductions that take a pass over memory of their own, so that saving pays.

    XLA fuses a reduction of rows with its readers: a softmax is one kernel, and recomputing its
    sums costs nothing. A reduction of other axes, or of rows too long for that, is a kernel by
    itself. So are two reductions of rows that read one array side by side, as those of a variance
    by the mean of squares: they share a kernel that writes nothing else.

    And where a vector scales the rows, as in most norms, its gradient adds up products over all
    rows, which no kernel does that has sums of each row: with the sums saved, XLA does not store
    the products in float32. Under a root mean square it stores them all the same, and for longer.

    See: ``python -m benchmarks.techniques --target h200 --only all saved-statistics``, JAX 0.10.2.
    """
    statistics = bytearray(len(graph.nodes))
    reductions = [n for n in graph.nodes if n.role is Role.REDUCE and fusible[n.index]]
    scaled = _find_scaled(graph, fusible, levels)
    maker = {v: n for n in graph.nodes if reductions and fusible[n.index] for v in n.outs}
    short = (node for node in reductions if reduces_rows(graph, node, LONGEST_ROW))
    read = {node: _read(graph, provenance, maker, levels, node) for node in short}
    # XLA merges equal reductions (common subexpressions).
    different = {(node.name, node.ins): parts for node, parts in read.items()}
    readers = Counter(part for parts in different.values() for part in parts)
    for node in reductions:
        parts, made = read.get(node), maker.get(node.ins[0])
        is_beside = parts is None or any(readers[part] > 1 for part in parts)
        is_of_squares = bool(parts) and made is not None and is_square(made)
        is_scaled = union(scaled, node.outs) and not is_of_squares
        statistics[node.index] = is_beside or is_scaled
    return statistics


def _find_scaled(graph: Graph, fusible: bytearray, levels: Sequence[int]) -> bytearray:
    """Mark, per value, what a vector along its rows multiplies in the same kernel."""
    scaled = bytearray(len(graph.avals))
    for node in reversed(graph.nodes):
        if node.role not in ARITHMETIC or not fusible[node.index]:
            continue
        out = node.outs[0]
        factors = node.ins if node.name == "mul" else ()
        by_vector = [_is_along_rows(graph, v, out) for v in factors]
        for place, value in enumerate(node.ins if scaled[out] or any(by_vector) else ()):
            is_scaled = scaled[out] or any(by_vector[:place] + by_vector[place + 1 :])
            if is_scaled and levels[value] == levels[out]:
                scaled[value] = 1
    return scaled


def _is_along_rows(graph: Graph, value: int, out: int) -> bool:
    """Return whether a value differs along a row and is the same in many, which XLA adds up fused.

    Of one vector for all rows these are many; for the rows of each image `split_sums` sees to it.
    """
    source = graph.origin(value)
    columns = graph.avals[source].shape[-1:]
    least = _ROWS if columns == (graph.sizes[source],) else 1
    is_row = bool(columns) and columns == graph.avals[out].shape[-1:]
    return is_row and is_smaller(least * graph.sizes[source], graph.sizes[out])


_ROWS = 4096
"""Rows that XLA:GPU adds up without fusing the sum, as one block of threads adds up each column.

A transformer of 4,096 tokens moves 1 % more bytes with saved sums, a speech encoder of 8,192 moves
1.5 % fewer (`python -m benchmarks.deviceless --target h200`, `grad(amp(f))`, JAX 0.10.2).
"""


def _read(
    graph: Graph,
    provenance: Provenance,
    maker: dict[int, Node],
    levels: Sequence[int],
    reduction: Node,
) -> set[tuple[int, int]]:
    """Return what a reduction reads in its kernel, and when; nothing behind another one."""
    here = levels[reduction.outs[0]]
    found: set[int] = set()
    pending = list(reduction.ins)
    while pending and len(found) < _FAR:
        value = pending.pop()
        if value in found or value in graph.constants:
            continue
        found.add(value)
        node = maker.get(value)
        if node is not None and levels[value] == here:
            if node.role is Role.REDUCE:
                return set()
            pending += node.ins
    return {(here, value) for value in found if provenance.dense[value]}
