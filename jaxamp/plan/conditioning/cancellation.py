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
from jaxamp.plan.dataflow.provenance import Facts
from jaxamp.plan.dataflow.regions import Interior
from jaxamp.plan.graph.consumers import between
from jaxamp.plan.graph.graph import Graph, Node, Role, is_smaller, movements


class Offset(NamedTuple):
    """How a value changes with another one, its origin.

    Attributes:
      origin: the other one.
      sign: whether the value grows (1) or shrinks (-1) with it.
      factor: whether it contains the exponential of the origin as a factor, rather than the origin
        as a term.
      carried: how many kernels and cuts are between the two.
    """

    origin: int
    sign: int
    factor: bool
    carried: int


Offsets = frozenset[Offset]
_NOTHING: Offsets = frozenset()
_MOST = 8  # origins of one value: the last ones


def find_met(graph: Graph, facts: Facts, interior: Interior) -> list[int]:
    """Values that cancel with what a kernel has made of them, and all values in between."""
    if not _may_meet(graph, interior):
        return []
    offsets = _Offsets(graph, facts, interior)
    for node in graph.nodes:
        offsets.enter(node)
    return offsets.met


def _may_meet(graph: Graph, interior: Interior) -> bool:
    """Whether what has gone through a kernel or a cut is joined with anything but known numbers."""
    constants = graph.constants.keys()
    nodes = [n for n in graph.nodes if n.ins and (n.role is Role.MOVE or interior.kernels[n.index])]
    apart = [node for node in nodes if _moves_apart(graph, interior, node)]
    if not apart:
        return False
    sums = (node for node in nodes if node.role is not Role.MOVE and _adds(node))
    moved = (pair for node in (*apart, *sums) for pair in movements(node))
    pending = [out for source, out in moved if source not in constants]
    seen = set(pending)
    while pending:
        for reader in graph.uses[pending.pop()]:
            if reader.name in _JOINED and constants.isdisjoint(reader.ins):
                return True
            if _hands_on(reader):
                new = [out for out in reader.outs if out not in seen]
                seen.update(new)
                pending += new
    return False


def _hands_on(node: Node) -> bool:
    """Whether what a node makes may grow with what it reads."""
    return node.role in _HANDING or node.name in _BENT or node.name in _JOINED or node.name in _EVEN


def _moves_apart(graph: Graph, interior: Interior, node: Node) -> bool:
    """Whether what a node makes and what it reads are in different kernels or rows."""
    if node.role is Role.MOVE:
        return is_smaller(graph.sizes[node.outs[0]], graph.sizes[node.ins[0]])
    return bool(interior.kernels[node.index]) and _carries(node)


def _carries(node: Node) -> bool:
    """Whether adding a number to all that a node reads adds it to what the node makes, too."""
    picks = node.trait is Trait.EXTREMUM or node.name == "cumlogsumexp"
    return picks or node.trait is Trait.NO_KERNEL


def _adds(node: Node) -> bool:
    """Whether what a node makes has the factors that all that it reads has."""
    return node.trait is Trait.SUM or node.name == "cumsum"


class _Offsets:
    """A sweep forward.

    Attributes:
      of: what each value grows or shrinks with.
      met: what must not be rounded.
    """

    def __init__(self, graph: Graph, facts: Facts, interior: Interior) -> None:
        self.graph, self.facts, self.interior = graph, facts, interior
        self.of: list[Offsets] = [_NOTHING] * len(graph.avals)
        self.maker: dict[int, Node] = {}
        self.met: list[int] = []

    def enter(self, node: Node) -> None:
        """Finds what the results of a node grow with."""
        for source, out in movements(node) if node.ins else ():
            self.maker[out] = node
            if self.graph.kinds[out] in "iub":
                continue
            found = self._found(node, source)
            if self.facts.dense[out] and all(o.factor for o in found):
                found |= {Offset(out, 1, factor=False, carried=0)}
            if len(found) > _MOST:
                found = frozenset(sorted(found)[-_MOST:])
            self.of[out] = found

    def _found(self, node: Node, source: int) -> Offsets:
        parts = [v for v in dict.fromkeys(node.ins) if self.of[v]]
        if not parts:
            return _NOTHING
        if node.role is Role.MOVE:
            return self._moved(node, source)
        if node.name in _BENT:
            return _bent(self.of[source], to_factor=node.name == "exp")
        if node.name in _JOINED:
            return self._joined(node)
        if node.role is Role.MERGE or node.name in _CHOOSING:
            return self._common(parts)
        if node.role is Role.REDUCE or node.role is Role.FIXED:
            return self._folded(node, source)
        return _turned(self.of[source]) if node.name == "neg" else _NOTHING

    def _moved(self, node: Node, source: int) -> Offsets:
        apart = _moves_apart(self.graph, self.interior, node)
        return _carry(self.of[source]) if apart else self.of[source]

    def _folded(self, node: Node, source: int) -> Offsets:
        """Sums hand on factors, and what picks or filters hands on terms."""
        adds, carries = _adds(node), _carries(node)
        kept = frozenset(o for o in self.of[source] if carries or (adds and o.factor))
        return _carry(kept) if self.interior.kernels[node.index] else kept

    def _joined(self, node: Node) -> Offsets:
        """Of a sum the terms, of a product the factors; what cancels is noted."""
        factor, turns = _JOINED[node.name]
        found: set[Offset] = set()
        cancelled: set[Offset] = set()
        met: list[int] = []
        for place, value in enumerate(node.ins):
            given = _turned(self.of[value]) if turns and place else self.of[value]
            kept = {o for o in given if o.factor is factor}
            for pair in _cancelling(found, kept):
                cancelled.update(pair)
                met += [o.origin for o in pair if pair[0].carried != pair[1].carried]
            found |= kept
        if met:
            self._meet(node, max(met))
        return frozenset(found - cancelled)

    def _common(self, parts: Iterable[int]) -> Offsets:
        """What all have in common: a choice between them grows as they do."""
        first, *others = [self.of[v] for v in parts]
        return frozenset(o for o in first if all(_has(other, o) for other in others))

    def _meet(self, node: Node, origin: int) -> None:
        """Notes all that leads from an origin to where it cancels."""

        def grows_with_it(value: int) -> bool:
            return any(o.origin == origin for o in self.of[value])

        found = between(self.maker, {origin}, node.ins, grows_with_it)
        self.met += [v for v in found if self.facts.dense[v]]


_HANDING = (Role.MOVE, Role.MERGE, Role.REDUCE, Role.FIXED)
_BENT = ("exp", "log")
_CHOOSING = ("max", "min", "select_n")
_EVEN = (*_CHOOSING, "neg")

# Whether factors are joined, not terms, and whether the second operand is turned.
_JOINED = {
    "add": (False, False),
    "add_any": (False, False),
    "sub": (False, True),
    "mul": (True, False),
    "div": (True, True),
}


def _turned(offsets: Offsets) -> Offsets:
    return frozenset(o._replace(sign=-o.sign) for o in offsets)


def _bent(offsets: Offsets, *, to_factor: bool) -> Offsets:
    return frozenset(o._replace(factor=to_factor) for o in offsets if o.factor is not to_factor)


def _carry(offsets: Offsets) -> Offsets:
    return frozenset(o._replace(carried=o.carried + 1) for o in offsets)


def _has(offsets: Iterable[Offset], one: Offset) -> bool:
    return any(o[:3] == one[:3] for o in offsets)


def _cancelling(left: Iterable[Offset], right: Iterable[Offset]) -> Iterator[tuple[Offset, Offset]]:
    for one in left:
        for other in right:
            if one.origin == other.origin and one.sign != other.sign:
                yield one, other
