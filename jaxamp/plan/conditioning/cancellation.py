"""Detect cancellation `x - f(x)` where `f(x)` is computed by another kernel.

`c - cummax(c)`, `c + cumlogsumexp(i - c)`, `h - irfft(rfft(h))`: a perturbation of `c` appears in
both terms and cancels. A kernel of its own reads the stored, rounded `c`, whereas the fused reader
takes `c` in float32. The rounding then appears in one of the terms only and does not cancel.

Means and maxima of whole rows are no such case: they are fused, and read what all other readers
read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.dataflow.regions import FusionRegions
from jaxamp.plan.graph.consumers import between
from jaxamp.plan.graph.graph import Graph, Node, Role, is_smaller, movements


class Dependence(NamedTuple):
    """Dependence of a value on another one, its origin.

    Attributes:
      origin: the other value.
      sign: 1 if the value increases with the origin, -1 if it decreases.
      is_factor: whether `exp(origin)` is a factor of the value, rather than `origin` a term.
      kernels: number of kernels and slices between the two.
    """

    origin: int
    sign: int
    is_factor: bool
    kernels: int


Dependences = frozenset[Dependence]
_NOTHING: Dependences = frozenset()
_MOST = 8  # dependences kept per value, the latest: a bound on time


def find_cancelling(graph: Graph, provenance: Provenance, regions: FusionRegions) -> list[int]:
    """Return values that cancel with a kernel's function of them, and all values in between."""
    if not _may_cancel(graph, regions):
        return []
    dependences = _Cancellation(graph, provenance, regions)
    for node in graph.nodes:
        dependences.enter(node)
    return dependences.cancelling


def _may_cancel(graph: Graph, regions: FusionRegions) -> bool:
    """Return whether the output of a kernel or slice is combined with anything but known numbers.

    It is a cheap test: most programs have no such combination, and need no sweep.
    """
    constants = graph.constants.keys()
    nodes = [n for n in graph.nodes if n.ins and (n.role is Role.MOVE or regions.kernels[n.index])]
    apart = [node for node in nodes if _moves_apart(graph, regions, node)]
    if not apart:
        return False
    sums = (node for node in nodes if node.role is not Role.MOVE and _keeps_factors(node))
    moved = (pair for node in (*apart, *sums) for pair in movements(node))
    pending = [out for source, out in moved if source not in constants]
    seen = set(pending)
    while pending:
        for reader in graph.readers[pending.pop()]:
            if reader.name in _COMBINING and constants.isdisjoint(reader.ins):
                return True
            if _propagates(reader):
                new = [out for out in reader.outs if out not in seen]
                seen.update(new)
                pending += new
    return False


def _propagates(node: Node) -> bool:
    """Return whether the results of a node may depend on its operands as terms or factors."""
    return (
        node.role in _PROPAGATING
        or node.name in _CURVES
        or node.name in _COMBINING
        or node.name in _TERMWISE
    )


def _moves_apart(graph: Graph, regions: FusionRegions, node: Node) -> bool:
    """Return whether operand and result of a node belong to different kernels or rows."""
    if node.role is Role.MOVE:
        return is_smaller(graph.sizes[node.outs[0]], graph.sizes[node.ins[0]])
    return bool(regions.kernels[node.index]) and _keeps_terms(node)


def _keeps_terms(node: Node) -> bool:
    """Return whether adding a constant to all operands of a node adds it to the result."""
    selects = node.trait is Trait.EXTREMUM or node.name == "cumlogsumexp"
    return selects or node.trait is Trait.NO_KERNEL


def _keeps_factors(node: Node) -> bool:
    """Return whether a common factor of all operands of a node is a factor of the result."""
    return node.trait is Trait.SUM or node.name == "cumsum"


class _Cancellation:
    """Forward sweep that tracks which terms and factors each value consists of.

    Attributes:
      of: per value, its dependences on earlier values.
      maker: the node that computes each value.
      cancelling: values that must not be rounded.
    """

    def __init__(self, graph: Graph, provenance: Provenance, regions: FusionRegions) -> None:
        self.graph, self.provenance, self.regions = graph, provenance, regions
        self.of: list[Dependences] = [_NOTHING] * len(graph.avals)
        self.maker: dict[int, Node] = {}
        self.cancelling: list[int] = []

    def enter(self, node: Node) -> None:
        """Record the dependences of a node's results."""
        for source, out in movements(node) if node.ins else ():
            self.maker[out] = node
            if self.graph.kinds[out] in "iub":
                continue
            found = self._found(node, source)
            if self.provenance.dense[out] and all(o.is_factor for o in found):
                found |= {Dependence(out, 1, is_factor=False, kernels=0)}
            if len(found) > _MOST:
                found = frozenset(sorted(found)[-_MOST:])
            self.of[out] = found

    def _found(self, node: Node, source: int) -> Dependences:
        parts = [v for v in dict.fromkeys(node.ins) if self.of[v]]
        if not parts:
            return _NOTHING
        if node.role is Role.MOVE:
            return self._moved(node, source)
        if node.name in _CURVES:
            return _through_curve(self.of[source], to_factor=node.name == "exp")
        if node.name in _COMBINING:
            return self._combined(node)
        if node.role is Role.MERGE or node.name in _CHOOSING:
            return self._common(parts)
        if node.role is Role.REDUCE or node.role is Role.FIXED:
            return self._reduced(node, source)
        return _negated(self.of[source]) if node.name == "neg" else _NOTHING

    def _moved(self, node: Node, source: int) -> Dependences:
        apart = _moves_apart(self.graph, self.regions, node)
        return _through_kernel(self.of[source]) if apart else self.of[source]

    def _reduced(self, node: Node, source: int) -> Dependences:
        """Return the dependences of a reduction: sums keep factors, maxima keep terms."""
        adds, carries = _keeps_factors(node), _keeps_terms(node)
        kept = frozenset(o for o in self.of[source] if carries or (adds and o.is_factor))
        return _through_kernel(kept) if self.regions.kernels[node.index] else kept

    def _combined(self, node: Node) -> Dependences:
        """Return the terms of a sum or the factors of a product, less those that cancel."""
        is_factor, negates = _COMBINING[node.name]
        found: set[Dependence] = set()
        cancelled: set[Dependence] = set()
        cancelling: list[int] = []
        for place, value in enumerate(node.ins):
            given = _negated(self.of[value]) if negates and place else self.of[value]
            kept = {o for o in given if o.is_factor is is_factor}
            for pair in _cancelling(found, kept):
                cancelled.update(pair)
                cancelling += [o.origin for o in pair if pair[0].kernels != pair[1].kernels]
            found |= kept
        if cancelling:
            self._mark_cancelling(node, max(cancelling))
        return frozenset(found - cancelled)

    def _common(self, parts: Iterable[int]) -> Dependences:
        """Return the dependences that all operands share: a selection between them has these."""
        first, *others = [self.of[v] for v in parts]
        return frozenset(o for o in first if all(_contains(other, o) for other in others))

    def _mark_cancelling(self, node: Node, origin: int) -> None:
        """Mark all values on paths from an origin to the node where it cancels."""

        def grows_with_it(value: int) -> bool:
            return any(o.origin == origin for o in self.of[value])

        found = between(self.maker, {origin}, node.ins, grows_with_it)
        self.cancelling += [v for v in found if self.provenance.dense[v]]


_PROPAGATING = (Role.MOVE, Role.MERGE, Role.REDUCE, Role.FIXED)
_CURVES = ("exp", "log")
_CHOOSING = ("max", "min", "select_n")
_TERMWISE = (*_CHOOSING, "neg")

# Whether the operation combines factors, not terms, and whether it negates the second operand's.
_COMBINING = {
    "add": (False, False),
    "add_any": (False, False),
    "sub": (False, True),
    "mul": (True, False),
    "div": (True, True),
}


def _negated(dependences: Dependences) -> Dependences:
    return frozenset(o._replace(sign=-o.sign) for o in dependences)


def _through_curve(dependences: Dependences, *, to_factor: bool) -> Dependences:
    return frozenset(
        o._replace(is_factor=to_factor) for o in dependences if o.is_factor is not to_factor
    )


def _through_kernel(dependences: Dependences) -> Dependences:
    return frozenset(o._replace(kernels=o.kernels + 1) for o in dependences)


def _contains(dependences: Iterable[Dependence], one: Dependence) -> bool:
    return any(o[:3] == one[:3] for o in dependences)


def _cancelling(
    left: Iterable[Dependence], right: Iterable[Dependence]
) -> Iterator[tuple[Dependence, Dependence]]:
    for one in left:
        for other in right:
            if one.origin == other.origin and one.sign != other.sign:
                yield one, other
