"""Second moments within windows, groups and prefixes: `mean(x * x) - mean(x) ** 2`.

What is left is less than the roundings of either term where the mean is larger than the deviation.
Of whole rows and batches such means are statistics, and float32 anyway. Those within windows or
groups are of an activation's size, and would be stored. So it is backward: the cotangent of `x` is
`x * mean(g) - mean(mean(x) * g)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.conditioning.squared_distances import is_square
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.dataflow.regions import is_pooling_gradient, is_window
from jaxamp.plan.graph.consumers import between
from jaxamp.plan.graph.graph import Graph, Node, Role, movements


class Moment(NamedTuple):
    """A product of values, summed over windows or not.

    Attributes:
      origins: the one or two values that are multiplied, in order.
      sums: how many sums over windows the factors and their product have gone through, in all.
    """

    origins: tuple[int, ...]
    sums: int


Moments = frozenset[Moment]
_NOTHING: Moments = frozenset()
_MOST = 16  # moments of one value: the last ones
_TERMS = ("add", "sub", "add_any")
_ADDING = (Trait.SUM, Trait.PREFIX)


def find_second_moments(graph: Graph, provenance: Provenance) -> list[int]:
    """Activations between two values and the sum of two moments of theirs that nearly cancels."""
    windows = (node for node in graph.nodes if _is_window(graph, node))
    if not any(provenance.dense[v] for node in windows for v in node.outs):
        return []
    moments = _Moments(graph, provenance)
    for node in graph.nodes:
        moments.enter(node)
    return moments.cancelling


def _is_window(graph: Graph, node: Node) -> bool:
    """Whether a node sums parts of an array, other than to where the largest of each was."""
    adds = node.trait in _ADDING and node.name not in _TERMS and not is_pooling_gradient(node)
    return adds and is_window(graph, node)


class _Moments:
    """A sweep forward.

    Attributes:
      of: what moments each value is a sum of.
      cancelling: what must not be rounded.
    """

    def __init__(self, graph: Graph, provenance: Provenance) -> None:
        self.graph, self.provenance = graph, provenance
        self.of: dict[int, Moments] = {}
        self.maker: dict[int, Node] = {}
        self.cancelling: list[int] = []

    def enter(self, node: Node) -> None:
        """Finds what moments the results of a node are sums of."""
        for source, out in movements(node) if node.ins else ():
            if self.graph.is_float32[out]:
                found = self._found(node, source)
                self.maker[out] = node
                self.of[out] = frozenset(sorted(found)[-_MOST:]) or self._own(out)

    def _own(self, value: int) -> Moments:
        """That of a value before all folds: an input, a sum, what a curve has made."""
        is_known = value in self.graph.constants or not self.graph.is_float32[value]
        if is_known or not self.graph.avals[value].ndim:
            return _NOTHING
        return frozenset((Moment((value,), 0),))

    def _get(self, value: int) -> Moments:
        return self.of.get(value) or self._own(value)

    def _found(self, node: Node, source: int) -> Moments:
        if node.role is Role.MOVE or node.name in ("neg", "copy"):
            return self._get(source)
        if node.role is Role.MERGE:
            parts = [self._get(v) for v in node.ins if v not in self.graph.constants]
            return _NOTHING.union(*parts).intersection(*parts)
        if _is_window(self.graph, node):
            given = _NOTHING.union(*map(self._get, node.ins))  # of a scatter, its updates
            return frozenset(m._replace(sums=m.sums + 1) for m in given)
        if node.name in _TERMS:
            return self._added(node)
        if is_square(node):
            return _multiplied(self._get(source), self._get(source))
        if node.name == "mul":
            return _multiplied(*map(self._get, node.ins))
        if node.name == "div" and not self.provenance.dense[node.ins[1]]:
            return self._get(source)  # by how many there are
        return _NOTHING

    def _added(self, node: Node) -> Moments:
        one, other = map(self._get, node.ins)
        if not any(m.sums or len(m.origins) == 2 for m in one | other):
            return _NOTHING
        if cancelling := {m.origins for m, n in product(one, other) if _differ(m, n)}:
            self._mark_cancelling(node, cancelling)
        return one | other

    def _mark_cancelling(self, node: Node, cancelling: Iterable[tuple[int, ...]]) -> None:
        """Notes all that leads from origins to where their moments meet."""
        origins = {origin for pair in cancelling for origin in pair}

        def is_of_them(value: int) -> bool:
            return any(origins.issuperset(m.origins) for m in self._get(value))

        found = between(self.maker, origins, node.ins, is_of_them)
        self.cancelling += [v for v in found if self.provenance.dense[v]]


def _multiplied(one: Moments, other: Moments) -> Moments:
    """By something that is no sum of moments, a known number say, they stay what they are."""
    if not one or not other:
        return one | other
    return frozenset(
        Moment(tuple(sorted(m.origins + n.origins)), m.sums + n.sums)
        for m, n in product(one, other)
        if len(m.origins) + len(n.origins) == 2
    )


def _differ(one: Moment, other: Moment) -> bool:
    """Whether the same two values were multiplied before a sum and after one."""
    return len(one.origins) == 2 and one.origins == other.origins and one.sums != other.sums
