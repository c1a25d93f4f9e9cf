"""Collect, per value, the numerical hazards of storing it in a narrow format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from jaxamp.core.formats import Precision
from jaxamp.core.guards import Guard
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.conditioning.amplification import find_amplified
from jaxamp.plan.conditioning.forget_gates import find_forget_gates
from jaxamp.plan.conditioning.lookup_places import find_lookup_places
from jaxamp.plan.conditioning.singularities import (
    AT_NUMBER,
    AT_ZERO,
    MAY_OVERFLOW,
    find_singularities,
    find_small_divisors,
)
from jaxamp.plan.conditioning.squared_distances import find_squared_distances
from jaxamp.plan.conditioning.unrolled_recurrences import find_unrolled_recurrences
from jaxamp.plan.dataflow.constraints import Constraint, is_inexact
from jaxamp.plan.dataflow.dataflow import Dataflow
from jaxamp.plan.dataflow.provenance import LARGE, SOLVED, TINY
from jaxamp.plan.dataflow.uses import FEEDS_FACTORIZATION, STOPS_LOOP
from jaxamp.plan.graph.graph import Node
from jaxamp.plan.graph.sweeps import union
from jaxamp.policy.policy import PrecisionPolicy

FORGET_GATE = Constraint("multiplies a carry in every iteration", Guard.LOOP_CARRY)
UNROLLED_CARRY = Constraint("carry of an unrolled recurrence", Guard.LOOP_CARRY)
AMPLIFIED = Constraint("a later operation amplifies its rounding", Guard.SENSITIVE)
LOOKUP_PLACE = Constraint("says where to look something up", Guard.SENSITIVE)
SQUARED_DISTANCE = Constraint("gradients of its squares and products cancel", Guard.SENSITIVE)


@dataclass(frozen=True, slots=True)
class Hazards:
    """Numerical hazards of a program's values.

    Attributes:
      flow: the program, and what is known of it.
      singularities: per value, flags for singularities of its readers, at zero or elsewhere; see
        `singularities.py`.
      small_divisors: per value, whether it may underflow, or is divided by what may; see
        `singularities.py`.
      forget_gates: factors of a carry in every iteration of a loop; see `forget_gates.py`.
      squared_distances: values whose squares and products nearly cancel; see
        `squared_distances.py`.
      lookup_places: values from which indices are computed; see `lookup_places.py`.
      constraints: values with one of the other hazards; only under guards that are on.
      guards: guards of the policy.
    """

    flow: Dataflow
    singularities: bytearray
    small_divisors: bytearray
    forget_gates: Set[int]
    squared_distances: Set[int]
    lookup_places: Set[int]
    constraints: Mapping[int, Constraint]
    guards: Set[Guard]

    def of(self, node: Node, outs: Sequence[int], low: Precision) -> Constraint | None:
        """Return why the results of a node have to stay float32, or `None`.

        Args:
          node: the node.
          outs: its float32 results.
          low: the narrow format.
        """
        (graph, provenance, uses, _), guards = self.flow, self.guards
        known, flags = union(provenance.bits, outs), union(uses.bits, outs)
        if Guard.RANGE in guards:
            if known & (LARGE | TINY):
                return Constraint(f"depends on a constant beyond {low.short}", Guard.RANGE)
            if low is Precision.F16 and node.trait is Trait.SENSITIVE:
                return Constraint("may overflow f16", Guard.RANGE)
            if low is Precision.F16 and union(self.small_divisors, outs) & MAY_OVERFLOW:
                return Constraint(
                    "quotient of a possibly small divisor: may overflow f16", Guard.RANGE
                )
        if Guard.EXACT_INTEGER in guards and any(is_inexact(graph, v, low) for v in outs):
            return Constraint(
                f"integers of more than {low.mantissa_bits} bits", Guard.EXACT_INTEGER
            )
        for value in outs:
            if value in self.constraints:
                return self.constraints[value]
        near = union(self.singularities, outs)
        if Guard.SENSITIVE in guards and near & AT_NUMBER:
            return Constraint(
                "rounding may hit a singularity of a later operation", Guard.SENSITIVE
            )
        if Guard.RANGE in guards and low is Precision.F16 and near & AT_ZERO:
            return Constraint("a divisor that may be zero in f16", Guard.RANGE)
        if Guard.LOOP_CARRY in guards and flags & STOPS_LOOP:
            return Constraint("decides when a loop stops", Guard.LOOP_CARRY)
        if Guard.NO_KERNEL in guards and (flags & FEEDS_FACTORIZATION or known & SOLVED):
            return Constraint("part of a matrix factorization", Guard.NO_KERNEL)
        return None


def find_hazards(flow: Dataflow, policy: PrecisionPolicy) -> Hazards:
    """Run all analyses of this folder."""
    graph, provenance = flow.graph, flow.provenance
    small_divisors = find_small_divisors(graph, provenance)
    recurrences = find_unrolled_recurrences(graph, provenance)
    forget_gates = find_forget_gates(graph, recurrences)
    squared_distances, lookup_places = find_squared_distances(graph), find_lookup_places(graph)
    simple: Sequence[
        tuple[Constraint, Iterable[int]]
    ] = (  # reports give the first that holds for a value
        (FORGET_GATE, forget_gates),
        (UNROLLED_CARRY, (v for node, read in recurrences for v in (read, *node.outs))),
        (LOOKUP_PLACE, lookup_places),
        (SQUARED_DISTANCE, squared_distances),
        (AMPLIFIED, find_amplified(flow)),
    )
    return Hazards(
        flow=flow,
        singularities=find_singularities(graph, small_divisors),
        small_divisors=small_divisors,
        forget_gates=forget_gates,
        squared_distances=squared_distances,
        lookup_places=lookup_places,
        constraints={
            v: constraint
            for constraint, found in reversed(simple)
            if constraint.guard in policy.guards
            for v in found
        },
        guards=policy.guards,
    )
