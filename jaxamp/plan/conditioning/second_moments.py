"""Detect cancellation in second moments of windows, groups and prefixes: `mean(x²) - mean(x)²`.

Where the mean exceeds the deviation, the difference is smaller than the rounding of either term.
Over whole rows and batches such means are statistics, and float32 anyway. Over windows or groups
they have an activation's size, and would be stored narrow. The backward pass has the same
cancellation: the cotangent of `x` is `x * mean(g) - mean(mean(x) * g)`.

See: Chan, Golub and LeVeque, "Algorithms for computing the sample variance: analysis and
recommendations", The American Statistician 37(3), 1983.
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
      sums: number of window sums on the way from the factors to the product, in all.
    """

    origins: tuple[int, ...]
    sums: int


Moments = frozenset[Moment]
_NOTHING: Moments = frozenset()
_MOST = 16  # moments kept per value, the latest: a bound on time
_TERMS = ("add", "sub", "add_any")
_ADDING = (Trait.SUM, Trait.PREFIX)


def find_second_moments(graph: Graph, provenance: Provenance) -> list[int]:
    """Return activations on paths from values to a difference of their second moments."""
    windows = (node for node in graph.nodes if _is_window(graph, node))
    if not any(provenance.dense[v] for node in windows for v in node.outs):
        return []
    moments = _Moments(graph, provenance)
    for node in graph.nodes:
        moments.enter(node)
    return moments.cancelling


def _is_window(graph: Graph, node: Node) -> bool:
    """Return whether a node sums over windows, other than the gradient of a maximum pooling."""
    adds = node.trait in _ADDING and node.name not in _TERMS and not is_pooling_gradient(node)
    return adds and is_window(graph, node)


class _Moments:
    """Forward sweep that tracks which moments each value is a sum of.

    Attributes:
      of: per value, its moments.
      maker: the node that computes each value.
      cancelling: values that must not be rounded.
    """

    def __init__(self, graph: Graph, provenance: Provenance) -> None:
        self.graph, self.provenance = graph, provenance
        self.of: dict[int, Moments] = {}
        self.maker: dict[int, Node] = {}
        self.cancelling: list[int] = []

    def enter(self, node: Node) -> None:
        """Record the moments of a node's results."""
        for source, out in movements(node) if node.ins else ():
            if self.graph.is_float32[out]:
                found = self._found(node, source)
                self.maker[out] = node
                self.of[out] = frozenset(sorted(found)[-_MOST:]) or self._own(out)

    def _own(self, value: int) -> Moments:
        """Return the first moment of a value that no window sum has made."""
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
            given = _NOTHING.union(*map(self._get, node.ins))  # a scatter sums its updates
            return frozenset(m._replace(sums=m.sums + 1) for m in given)
        if node.name in _TERMS:
            return self._added(node)
        if is_square(node):
            return _multiplied(self._get(source), self._get(source))
        if node.name == "mul":
            return _multiplied(*map(self._get, node.ins))
        if node.name == "div" and not self.provenance.dense[node.ins[1]]:
            return self._get(source)  # a mean: divided by the number of its terms
        return _NOTHING

    def _added(self, node: Node) -> Moments:
        one, other = map(self._get, node.ins)
        if not any(m.sums or len(m.origins) == 2 for m in one | other):
            return _NOTHING
        if cancelling := {m.origins for m, n in product(one, other) if _differ(m, n)}:
            self._mark_cancelling(node, cancelling)
        return one | other

    def _mark_cancelling(self, node: Node, cancelling: Iterable[tuple[int, ...]]) -> None:
        """Mark all values on paths from the origins to the node where their moments cancel."""
        origins = {origin for pair in cancelling for origin in pair}

        def is_of_them(value: int) -> bool:
            return any(origins.issuperset(m.origins) for m in self._get(value))

        found = between(self.maker, origins, node.ins, is_of_them)
        self.cancelling += [v for v in found if self.provenance.dense[v]]


def _multiplied(one: Moments, other: Moments) -> Moments:
    """Multiply sums of moments; a factor without moments, a known number say, changes nothing."""
    if not one or not other:
        return one | other
    return frozenset(
        Moment(tuple(sorted(m.origins + n.origins)), m.sums + n.sums)
        for m, n in product(one, other)
        if len(m.origins) + len(n.origins) == 2
    )


def _differ(one: Moment, other: Moment) -> bool:
    """Return whether two moments multiply the same values, one before a sum and one after it."""
    return len(one.origins) == 2 and one.origins == other.origins and one.sums != other.sums
