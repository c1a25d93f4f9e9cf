"""The cheapest labelling as a minimum cut: wide labels are on the side of the source.

A value that is stored in two formats pays for each once, however many labels ask for it: a node
for each value and format stands between them and the terminal. A cast between fused operations is
paid for by a node for each value and direction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from tests.placement.cost import BYTES
from tests.placement.problem import NARROW, WIDE, Pairs, Problem

LARGEST = np.iinfo(np.int32).max
"""SciPy's flows are 32 bits wide."""


def cut(problem: Problem) -> list[bool]:
    """A cheapest labelling.

    Args:
      problem: what is to be labelled.

    Raises:
      OverflowError: the costs do not fit what SciPy counts in.
    """
    network = _Network(len(problem.elements))
    for label in problem.pinned:
        network.forbid(WIDE, label)
    for one, other in problem.equal:
        network.forbid(one, other)
        network.forbid(other, one)
    for value, labels in _by_value(problem.stored):
        if value not in problem.given:
            network.charge_any_wide(labels, NARROW, problem.elements[value] * BYTES[True])
        network.charge_any_narrow(labels, WIDE, problem.elements[value] * BYTES[False])
    for value, labels in _by_value(problem.fused):
        network.charge_any_wide(labels, value, problem.elements[value])
        network.charge_any_narrow(labels, value, problem.elements[value])
    return network.wide_side()[: len(problem.elements)]


def _by_value(pairs: Pairs) -> Iterable[tuple[int, list[int]]]:
    labels: dict[int, list[int]] = defaultdict(list)
    for value, label in pairs:
        labels[value].append(label)
    return labels.items()


class _Network:
    """Edges from the source, the label that is wide, to the sink, the label that is narrow."""

    def __init__(self, labels: int) -> None:
        self.nodes = labels
        self.capacities: dict[tuple[int, int], int] = defaultdict(int)
        self.uncut: set[tuple[int, int]] = set()

    def forbid(self, wide: int, narrow: int) -> None:
        """The first must not be wide while the second is narrow."""
        if wide != narrow:
            self.uncut.add((wide, narrow))

    def charge_any_wide(self, labels: list[int], narrow: int, price: int) -> None:
        """A price if any of these is wide while `narrow` is narrow."""
        node = self._node()
        for label in labels:
            self.forbid(label, node)
        self.capacities[node, narrow] += price

    def charge_any_narrow(self, labels: list[int], wide: int, price: int) -> None:
        """A price if any of these is narrow while `wide` is wide."""
        node = self._node()
        for label in labels:
            self.forbid(node, label)
        self.capacities[wide, node] += price

    def _node(self) -> int:
        self.nodes += 1
        return self.nodes - 1

    def wide_side(self) -> list[bool]:
        """On which side of a minimum cut each node is."""
        without_end = sum(self.capacities.values()) + 1
        if without_end > LARGEST:
            raise OverflowError("the costs of this program do not fit SciPy's flows")
        edges = dict(self.capacities) | dict.fromkeys(self.uncut, without_end)
        ends = np.array(list(edges), np.int32).reshape(-1, 2)
        capacity = np.array(list(edges.values()), np.int32)
        shape = (self.nodes, self.nodes)
        graph = csr_array((capacity, (ends[:, 0], ends[:, 1])), shape=shape, dtype=np.int32)
        flow = maximum_flow(graph, WIDE, NARROW).flow
        left = graph - flow
        left.eliminate_zeros()
        reached = breadth_first_order(left, WIDE, return_predecessors=False)
        return np.isin(np.arange(self.nodes), reached).tolist()
