"""What is known of each value from where it comes from: one forward sweep, repeated over loops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxamp.plan.graph import Graph, Link, Node, Role
from jaxamp.taxonomy import Trait

UNBOUNDED = math.inf


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that the narrow formats of a policy hold in full accuracy."""

    largest: float
    smallest: float

    def is_large(self, number: float) -> bool:
        """Whether a finite number would become infinite."""
        return math.isfinite(number) and abs(number) > self.largest

    def is_tiny(self, number: float) -> bool:
        """Whether a nonzero number would lose accuracy or become zero."""
        return 0 < abs(number) < self.smallest


@dataclass(slots=True, eq=False)
class Facts:
    """Facts per value.

    Attributes:
      state: linked to a boundary float by elementwise operations and movement alone.
      dense: made by Compute, or from such a value without folding axes: of an activation's size.
      statistic: folded from other values (a mean, a norm, a maximum), not dense.
      solved: comes from a factorisation.
      layer: one slice of a stacked boundary value that a loop goes through: a layer's weights.
      widened: an explicit cast from a narrower float.
      large: may hold a constant that the narrow format turns into infinity.
      tiny: rests on a constant that the narrow format turns into zero.
      bound: for whole numbers the largest magnitude, ``None`` for other values.
    """

    state: bytearray
    dense: bytearray
    statistic: bytearray
    solved: bytearray
    layer: bytearray
    widened: bytearray
    large: bytearray
    tiny: bytearray
    bound: list[float | None]

    def snapshot(self) -> tuple[object, ...]:
        """What changes while the sweeps have not settled."""
        flags = (self.state, self.dense, self.statistic, self.solved, self.large, self.tiny)
        return tuple(bytes(f) for f in flags)


def find_facts(graph: Graph, limits: Range) -> Facts:
    """Sweeps forward until nothing changes; more than once only where a loop feeds back."""
    count = len(graph.avals)
    flags = [bytearray(count) for _ in range(8)]
    facts = Facts(*flags, bound=[None] * count)
    for value in graph.sources:
        facts.state[value] = graph.ours[value]
    for value, number in graph.constants.items():
        facts.large[value] = limits.is_large(number)
        facts.tiny[value] = limits.is_tiny(number)
        if number == int(number) if math.isfinite(number) else False:
            facts.bound[value] = abs(number)
    for value in graph.sources:
        facts.bound[value] = _bound_of_dtype(graph, value)
    for carry in graph.carries:
        if carry.kept:
            facts.state[carry.inner] = facts.state[carry.result] = graph.ours[carry.inner]
    for value in graph.activations:
        facts.dense[value] = graph.ours[value]
    before = None
    while before != (before := facts.snapshot()):
        for node in graph.nodes:
            _TRANSFER[node.role](graph, facts, node)
        if not graph.carries:
            break
    return facts


def _bound_of_dtype(graph: Graph, value: int) -> float | None:
    kind = graph.dtype_kind(value)
    if kind == "b":
        return 1.0
    if kind not in "iu":
        return None
    dtype = graph.avals[value].dtype
    return float(np.iinfo(dtype).max) if dtype.itemsize == 1 else UNBOUNDED


def _flow(facts: Facts, node: Node, *flags: bytearray) -> None:
    for flag in flags:
        if any(flag[i] for i in node.ins):
            for out in node.outs:
                flag[out] = 1


def _join_bounds(facts: Facts, node: Node) -> float | None:
    bounds = [facts.bound[i] for i in node.ins]
    return None if None in bounds or not bounds else max(b for b in bounds if b is not None)


def _contract(graph: Graph, facts: Facts, node: Node) -> None:
    whole = all(facts.bound[i] is not None for i in node.ins)
    _flow(facts, node, facts.large)
    for out in node.outs:
        facts.dense[out] = graph.ours[out]
        facts.bound[out] = UNBOUNDED if whole else None


def _reduce(graph: Graph, facts: Facts, node: Node) -> None:
    _flow(facts, node, facts.large, facts.tiny, facts.solved)
    bound = _join_bounds(facts, node)
    picks = node.trait is Trait.EXTREMUM
    paired = len(node.ins) == len(node.outs)
    for source, out in movements(node):
        folded = (source,) if paired else node.ins
        same_axes = graph.avals[out].ndim == graph.avals[source].ndim
        keeps_axes = same_axes or node.trait is Trait.ALLREDUCE
        facts.dense[out] = graph.ours[out] and keeps_axes and any(facts.dense[i] for i in folded)
        facts.statistic[out] = not keeps_axes
        facts.bound[out] = bound if picks or bound is None else UNBOUNDED
        if graph.dtype_kind(out) in "iu":
            facts.bound[out] = UNBOUNDED


def _elementwise(graph: Graph, facts: Facts, node: Node) -> None:
    _flow(facts, node, facts.dense, facts.solved)
    (out,) = node.outs
    size = graph.size(out)
    if any(facts.state[i] and graph.size(i) == size for i in node.ins):
        facts.state[out] = 1
    facts.statistic[out] = not facts.dense[out] and any(facts.statistic[i] for i in node.ins)
    facts.large[out] = _grows_large(graph, facts, node)
    facts.tiny[out] = _rests_on_tiny(facts, node)
    facts.bound[out] = _elementwise_bound(graph, facts, node)


# Only these hand a huge operand on: the others squash it, and `exp` of one is 0, or inf in f32 too.
_UNBOUNDED_CURVES = frozenset(
    {"pow", "integer_pow", "square", "sqrt", "sinh", "cosh", "cbrt", "lgamma", "tan", "rem"}
    | {"polynomial", "one_minus_square"}
)


def _grows_large(graph: Graph, facts: Facts, node: Node) -> bool:
    name = node.name
    if name == "div":
        # By a tiny constant itself, that is; `1 / (variance + epsilon)` is as large as the data.
        by_tiny = facts.tiny[node.ins[1]] and node.ins[1] in graph.constants
        return bool(facts.large[node.ins[0]] or by_tiny)
    squashes = node.trait in (Trait.SMOOTH, Trait.SENSITIVE) and name not in _UNBOUNDED_CURVES
    return not squashes and any(facts.large[i] for i in node.ins)


def _rests_on_tiny(facts: Facts, node: Node) -> bool:
    tiny = [i for i in node.ins if facts.tiny[i]]
    if not tiny:
        return False
    # A product or quotient with an activation is of the activation's size again.
    scales = node.name in ("mul", "div")
    return not (scales and any(facts.dense[i] and not facts.tiny[i] for i in node.ins))


def _elementwise_bound(graph: Graph, facts: Facts, node: Node) -> float | None:
    kind = graph.dtype_kind(node.outs[0])
    if kind == "b":
        return 1.0
    name = node.name
    if node.trait is Trait.INTEGRAL:
        return UNBOUNDED
    if name == "sign":
        return 1.0
    bounds = [facts.bound[i] for i in (node.ins[1:] if name == "select_n" else node.ins)]
    known = [b for b in bounds if b is not None]
    if len(known) < len(bounds):
        return UNBOUNDED if kind in "iu" else None
    if name in ("add", "sub", "add_any"):
        return sum(known)
    if name == "mul":
        return math.prod(known) if 0 not in known else 0.0
    if node.trait is Trait.EXACT:
        return max(known)
    return UNBOUNDED if kind in "iu" else None


def _move(graph: Graph, facts: Facts, node: Node) -> None:
    looks_up = any(graph.dtype_kind(i) in "iu" and i not in graph.constants for i in node.ins[1:])
    for source, out in movements(node):
        # A broadcast or a part of a parameter is not what an update hands on.
        same = graph.size(source) == graph.size(out)
        facts.state[out] = facts.state[source] and same and not looks_up
        for flag in (facts.dense, facts.statistic, facts.solved, facts.layer, facts.widened):
            flag[out] = flag[source]
        facts.large[out], facts.tiny[out] = facts.large[source], facts.tiny[source]
        facts.bound[out] = facts.bound[source]


def _merge(graph: Graph, facts: Facts, node: Node) -> None:
    _flow(facts, node, facts.state, facts.dense, facts.solved, facts.large)
    floats = [i for i in node.ins if graph.ours[i]] or node.ins[:1]
    bounds = [facts.bound[i] for i in floats]
    (out,) = node.outs
    facts.bound[out] = None if None in bounds else max(b for b in bounds if b is not None)


def _convert(graph: Graph, facts: Facts, node: Node) -> None:
    (source,), (out,) = node.ins, node.outs
    facts.bound[out] = facts.bound[source]
    if facts.bound[out] is None and graph.dtype_kind(out) in "iu":
        facts.bound[out] = _bound_of_dtype(graph, out)
    dtype = graph.avals[source].dtype
    # ml_dtypes' formats have kind "V" to numpy.
    facts.widened[out] = graph.ours[out] and dtype.itemsize < 4 and dtype.kind in "fV"


def _fixed(graph: Graph, facts: Facts, node: Node) -> None:
    if node.trait is Trait.LINALG or node.trait is Trait.SOLVER:
        for out in node.outs:
            facts.solved[out] = 1
    for out in node.outs:
        facts.bound[out] = _bound_of_dtype(graph, out)
        if node.trait is Trait.GENERATOR and getattr(graph.avals[out], "shape", None) is not None:
            facts.bound[out] = _iota_bound(graph, out)


def _iota_bound(graph: Graph, value: int) -> float:
    sizes = [d for d in graph.avals[value].shape if isinstance(d, int)]
    return float(max([1, *sizes])) if len(sizes) == len(graph.avals[value].shape) else UNBOUNDED


def _link(graph: Graph, facts: Facts, node: Node) -> None:
    _flow(facts, node, facts.state, facts.dense, facts.solved, facts.large, facts.tiny)
    _flow(facts, node, facts.statistic)
    (out,) = node.outs
    if node.link is Link.SLICE:
        facts.layer[out] = facts.state[node.ins[0]]
    if node.link is Link.INIT or node.link is Link.BACK:
        facts.bound[out] = _bound_of_dtype(graph, out)  # counts may grow from turn to turn
    else:
        facts.bound[out] = _join_bounds(facts, node)


def movements(node: Node) -> Iterator[tuple[int, int]]:
    """Pairs of (moved operand, result): one by one where there are as many, else the first."""
    if len(node.ins) == len(node.outs):
        yield from zip(node.ins, node.outs, strict=True)
    else:
        for out in node.outs:
            yield node.ins[0], out


_TRANSFER = {
    Role.CONTRACT: _contract,
    Role.REDUCE: _reduce,
    Role.ELEMENTWISE: _elementwise,
    Role.MOVE: _move,
    Role.MERGE: _merge,
    Role.CONVERT: _convert,
    Role.FIXED: _fixed,
    Role.LINK: _link,
}
