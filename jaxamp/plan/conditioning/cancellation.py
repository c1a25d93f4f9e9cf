"""Values that meet, with the opposite sign, what a kernel of its own has made of them.

`c - cummax(c)`, `c + cumlogsumexp(i - c)`, `h - irfft(rfft(h))`: what is added to `c` is added to
the other term too, and cancels. The kernel reads what is stored and its neighbours read float32,
so that a rounding of `c` in one of the two would not cancel.

Means and maxima of whole rows are not among them: they are fused, and read what all others read.
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
    """How a value changes with another one, its origin.

    Attributes:
      origin: the other one.
      sign: whether the value grows (1) or shrinks (-1) with it.
      is_factor: whether the exponential of the origin is a factor of it, rather than the origin a
        term.
      kernels: how many kernels and cuts are between the two.
    """

    origin: int
    sign: int
    is_factor: bool
    kernels: int


Dependences = frozenset[Dependence]
_NOTHING: Dependences = frozenset()
_MOST = 8  # origins of one value: the last ones


def find_cancelling(graph: Graph, provenance: Provenance, regions: FusionRegions) -> list[int]:
    """Values that cancel with what a kernel has made of them, and all values in between."""
    if not _may_cancel(graph, regions):
        return []
    dependences = _Cancellation(graph, provenance, regions)
    for node in graph.nodes:
        dependences.enter(node)
    return dependences.cancelling


def _may_cancel(graph: Graph, regions: FusionRegions) -> bool:
    """Whether what has gone through a kernel or a cut is joined with anything but known numbers."""
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
    """Whether what a node makes may grow with what it reads."""
    return (
        node.role in _PROPAGATING
        or node.name in _CURVES
        or node.name in _COMBINING
        or node.name in _TERMWISE
    )


def _moves_apart(graph: Graph, regions: FusionRegions, node: Node) -> bool:
    """Whether what a node makes and what it reads are in different kernels or rows."""
    if node.role is Role.MOVE:
        return is_smaller(graph.sizes[node.outs[0]], graph.sizes[node.ins[0]])
    return bool(regions.kernels[node.index]) and _keeps_terms(node)


def _keeps_terms(node: Node) -> bool:
    """Whether adding a number to all that a node reads adds it to what the node makes, too."""
    selects = node.trait is Trait.EXTREMUM or node.name == "cumlogsumexp"
    return selects or node.trait is Trait.NO_KERNEL


def _keeps_factors(node: Node) -> bool:
    """Whether what a node makes has the factors that all that it reads has."""
    return node.trait is Trait.SUM or node.name == "cumsum"


class _Cancellation:
    """A sweep forward.

    Attributes:
      of: what each value grows or shrinks with.
      cancelling: what must not be rounded.
    """

    def __init__(self, graph: Graph, provenance: Provenance, regions: FusionRegions) -> None:
        self.graph, self.provenance, self.regions = graph, provenance, regions
        self.of: list[Dependences] = [_NOTHING] * len(graph.avals)
        self.maker: dict[int, Node] = {}
        self.cancelling: list[int] = []

    def enter(self, node: Node) -> None:
        """Finds what the results of a node grow with."""
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
        """Sums hand on factors, and what picks or filters hands on terms."""
        adds, carries = _keeps_factors(node), _keeps_terms(node)
        kept = frozenset(o for o in self.of[source] if carries or (adds and o.is_factor))
        return _through_kernel(kept) if self.regions.kernels[node.index] else kept

    def _combined(self, node: Node) -> Dependences:
        """Of a sum the terms, of a product the factors; what cancels is noted."""
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
        """What all have in common: a choice between them grows as they do."""
        first, *others = [self.of[v] for v in parts]
        return frozenset(o for o in first if all(_contains(other, o) for other in others))

    def _mark_cancelling(self, node: Node, origin: int) -> None:
        """Notes all that leads from an origin to where it cancels."""

        def grows_with_it(value: int) -> bool:
            return any(o.origin == origin for o in self.of[value])

        found = between(self.maker, {origin}, node.ins, grows_with_it)
        self.cancelling += [v for v in found if self.provenance.dense[v]]


_PROPAGATING = (Role.MOVE, Role.MERGE, Role.REDUCE, Role.FIXED)
_CURVES = ("exp", "log")
_CHOOSING = ("max", "min", "select_n")
_TERMWISE = (*_CHOOSING, "neg")

# Whether factors are joined, not terms, and whether the second operand is turned.
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
