"""Collect, per value, the numerical hazards of storing it in a narrow format."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from jaxamp.core.formats import Precision
from jaxamp.core.guards import Guard
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.conditioning.amplification import find_amplified
from jaxamp.plan.conditioning.forget_gates import find_forget_gates
from jaxamp.plan.conditioning.singularities import (
    AT_NUMBER,
    AT_ZERO,
    MAY_OVERFLOW,
    find_divided,
    find_singularities,
    find_small_divisors,
)
from jaxamp.plan.conditioning.unrolled_recurrences import find_unrolled_recurrences
from jaxamp.plan.dataflow.constraints import Constraint, is_inexact
from jaxamp.plan.dataflow.dataflow import Dataflow
from jaxamp.plan.dataflow.linearity import Linearity
from jaxamp.plan.dataflow.provenance import LARGE, SOLVED, TINY
from jaxamp.plan.dataflow.uses import FEEDS_FACTORIZATION, STOPS_LOOP
from jaxamp.plan.graph.graph import Node
from jaxamp.plan.graph.sweeps import union
from jaxamp.policy.policy import PrecisionPolicy

FORGET_GATE = Constraint("multiplies a carry in every iteration", Guard.LOOP_CARRY)
UNROLLED_CARRY = Constraint("carry of an unrolled recurrence", Guard.LOOP_CARRY)
AMPLIFIED = Constraint("a later operation amplifies its rounding", Guard.SENSITIVE)
LOOKUP_PLACE = Constraint("says where to look something up", Guard.SENSITIVE)
PRECISE = Constraint("read by a product that is not rounded", Guard.SENSITIVE)


class Hazards:
    """Numerical hazards of a program's values: the results of all analyses of this folder.

    Attributes:
      forget_gates: factors of a carry in every iteration of a loop; see `forget_gates.py`.
      lookup_places: values that say where to look something up.
      ordered: values from whose order an index is taken.
    """

    def __init__(self, flow: Dataflow, linearity: Linearity, policy: PrecisionPolicy) -> None:
        graph, provenance = flow.graph, flow.provenance
        self._flow, self._guards = flow, policy.guards
        self._small_divisors = find_small_divisors(graph, provenance)
        in_f16 = Precision.F16 in policy.low
        self._divided = find_divided(graph) if in_f16 else frozenset[int]()
        self._singularities = find_singularities(graph, self._small_divisors)
        recurrences = find_unrolled_recurrences(graph, provenance)
        self.forget_gates = find_forget_gates(graph, recurrences)
        places = itertools.compress(range(len(graph.avals)), flow.uses.place)
        self.lookup_places = frozenset(v for v in places if graph.is_float32[v])
        amplified, self.ordered = find_amplified(flow, linearity)
        found: Sequence[tuple[Constraint, Iterable[int]]] = (  # reports give the first of a value
            (FORGET_GATE, self.forget_gates),
            (UNROLLED_CARRY, (v for node, read in recurrences for v in (read, *node.outs))),
            (LOOKUP_PLACE, self.lookup_places),
            (PRECISE, graph.unrounded),
            (AMPLIFIED, amplified | graph.undone),
        )
        self._constraints = {
            value: constraint
            for constraint, values in reversed(found)
            if constraint.guard in policy.guards
            for value in values
        }

    def of(self, node: Node, outs: Sequence[int], low: Precision) -> Constraint | None:
        """Return why the results of a node have to stay float32, or `None`."""
        (graph, provenance, uses, _), guards = self._flow, self._guards
        known = union(provenance.bits, outs)
        if Guard.RANGE in guards:
            if known & (LARGE | TINY):
                return Constraint(f"depends on a constant beyond {low.short}", Guard.RANGE)
            if low is Precision.F16 and node.trait is Trait.SENSITIVE:
                return Constraint("may overflow f16", Guard.RANGE)
            if low is Precision.F16 and union(self._small_divisors, outs) & MAY_OVERFLOW:
                return Constraint(
                    "quotient of a possibly small divisor: may overflow f16", Guard.RANGE
                )
            if low is Precision.F16 and not self._divided.isdisjoint(outs):
                return Constraint(
                    "divided by what may be tiny: its cotangent may overflow f16", Guard.RANGE
                )
        if Guard.EXACT_INTEGER in guards and any(is_inexact(graph, v, low) for v in outs):
            return Constraint(
                f"integers of more than {low.mantissa_bits} bits", Guard.EXACT_INTEGER
            )
        for value in outs:
            if value in self._constraints:
                return self._constraints[value]
        near = union(self._singularities, outs)
        if Guard.SENSITIVE in guards and near & AT_NUMBER:
            return Constraint(
                "rounding may hit a singularity of a later operation", Guard.SENSITIVE
            )
        if Guard.RANGE in guards and low is Precision.F16 and near & AT_ZERO:
            return Constraint("a divisor that may be zero in f16", Guard.RANGE)
        flags = union(uses.bits, outs)
        if Guard.LOOP_CARRY in guards and flags & STOPS_LOOP:
            return Constraint("decides when a loop stops", Guard.LOOP_CARRY)
        if Guard.NO_KERNEL in guards and (flags & FEEDS_FACTORIZATION or known & SOLVED):
            return Constraint("part of a matrix factorization", Guard.NO_KERNEL)
        return None
