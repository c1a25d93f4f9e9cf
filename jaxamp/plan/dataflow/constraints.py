"""Constraints that keep a contraction in float32, whatever the policy says of Compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxamp.core.formats import Precision
from jaxamp.core.guards import Guard
from jaxamp.core.intervals import magnitude
from jaxamp.jaxprs.contracted import EXPLICIT_PRECISION, has_explicit_precision
from jaxamp.plan.dataflow.exact import factor
from jaxamp.plan.dataflow.provenance import LARGE, SOLVED, WIDENED, Provenance
from jaxamp.plan.dataflow.uses import FEEDS_FACTORIZATION, STOPS_LOOP
from jaxamp.plan.graph.consumers import find_summed
from jaxamp.plan.graph.graph import Graph, Node
from jaxamp.plan.graph.sweeps import union
from jaxamp.policy.policy import PrecisionPolicy


class Constraint(NamedTuple):
    """A reason to stay in float32, and the guard that it belongs to."""

    reason: str
    guard: Guard | None


FACTORED = Constraint("feeds a matrix factorization", Guard.NO_KERNEL)
READS_SOLUTION = Constraint("reads the result of a matrix factorization", Guard.NO_KERNEL)
CANCELLED = Constraint("sums of squares of its operands nearly cancel it", Guard.SENSITIVE)
CAST = Constraint("an operand was cast to f32 explicitly", None)
WRITTEN = Constraint("multiplies numbers that the program makes of known ones", Guard.NO_GAIN)


def constrain_contraction(
    graph: Graph,
    provenance: Provenance,
    flags: int,
    policy: PrecisionPolicy,
    node: Node,
    low: Precision,
) -> Constraint | None:
    """Return why a Compute node has to stay in float32, or `None`."""
    guards = policy.guards
    assert node.op is not None  # a contraction is in the table
    floats = [v for v in node.op.multiplied(node.ins) if graph.kinds[v] not in "iub"]
    made = [v for v in node.outs if graph.kinds[v] not in "iub"]
    if not all(graph.is_float32[v] for v in (*floats, *made)):
        return Constraint("an operand is not float32: left as written", None)
    if has_explicit_precision(node.eqn):
        return Constraint(EXPLICIT_PRECISION, None)
    known = union(provenance.bits, floats)
    if known & WIDENED:
        return CAST
    if Guard.LOOP_CARRY in guards and flags & STOPS_LOOP:
        return Constraint("decides when a loop stops", Guard.LOOP_CARRY)
    if Guard.NO_KERNEL in guards:
        if flags & FEEDS_FACTORIZATION:
            return FACTORED
        if known & SOLVED:
            return READS_SOLUTION
    for constraint in misstated(graph, provenance, floats, low):
        if constraint.guard in guards:
            return constraint
    if Guard.RANGE in guards and any(_is_scaled_beyond(graph, v, low) for v in node.outs):
        return Constraint(f"scaled beyond {low.short}, as is its cotangent", Guard.RANGE)
    if Guard.NO_GAIN in guards and node.outs[0] in graph.written:
        return WRITTEN
    if Guard.NO_GAIN in guards and free_axes(graph, node) == 0:
        return Constraint("an inner product is a reduction", Guard.NO_GAIN)
    if Guard.REDUCTION_ISLAND in guards and find_summed(graph, node) is not None:
        return Constraint("a product with equal numbers is a sum", Guard.REDUCTION_ISLAND)
    return precise(graph, guards, node)


def precise(graph: Graph, guards: frozenset[Guard], node: Node) -> Constraint | None:
    """Return why a product is not to be rounded, if a guard says so."""
    found = graph.precise.get(node)
    return found if found and found.guard in guards else None


def misstated(
    graph: Graph, provenance: Provenance, values: Sequence[int], low: Precision
) -> Iterator[Constraint]:
    """Yield why a format makes other numbers of some values: infinities, or other integers."""
    if union(provenance.bits, values) & LARGE:
        yield Constraint(f"a constant, or a power spectrum, is beyond {low.short}", Guard.RANGE)
    bounds = (end for v in values if not provenance.dense[v] for end in graph.ranges[v])
    if any(_overflows(low, end) for end in bounds):
        yield Constraint(f"known numbers are beyond {low.short}", Guard.RANGE)
    if any(is_inexact(graph, v, low) for v in values):
        yield Constraint(f"integers of more than {low.mantissa_bits} bits", Guard.EXACT_INTEGER)


def free_axes(graph: Graph, node: Node) -> int:
    """Return the number of non-batch axes of a dot's result: zero for an inner product."""
    numbers = node.eqn.params.get("dimension_numbers")
    out = node.outs[0]
    if isinstance(numbers, tuple) and len(numbers) == 2:
        return graph.avals[out].ndim - len(numbers[1][0])
    return graph.avals[out].ndim


def _is_scaled_beyond(graph: Graph, value: int, low: Precision) -> bool:
    """Return whether a reader multiplies a value by a number beyond a format's range."""
    factors = [factor(graph, value, reader) for reader in graph.readers[value]]
    return any(f is not None and _overflows(low, f) for f in factors)


def _overflows(low: Precision, number: float) -> bool:
    """Return whether a format turns a number into infinity that is not as large as can be."""
    return low.max < abs(number) < Precision.F32.max


def is_inexact(graph: Graph, value: int, low: Precision) -> bool:
    """Return whether a value consists of integers that a format cannot represent."""
    return bool(graph.whole[value]) and magnitude(graph.ranges[value]).high > 2**low.mantissa_bits
