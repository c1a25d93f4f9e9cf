"""What values would lose in a narrow format, by all that the sweeps have found of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain

from jaxamp.core.formats import Precision
from jaxamp.core.guards import Guard
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.conditioning.cancellation import find_met
from jaxamp.plan.conditioning.exponents import find_exponents
from jaxamp.plan.conditioning.forget_gates import find_decays
from jaxamp.plan.conditioning.large_offsets import find_raised
from jaxamp.plan.conditioning.log_space_weights import find_weighed
from jaxamp.plan.conditioning.periodic_arguments import find_coordinates
from jaxamp.plan.conditioning.prefix_folds import find_folds
from jaxamp.plan.conditioning.second_moments import find_moments
from jaxamp.plan.conditioning.singularities import AT_NUMBER, AT_ZERO, find_poles
from jaxamp.plan.conditioning.squared_distances import find_distant
from jaxamp.plan.conditioning.topk_stability import find_ordered
from jaxamp.plan.conditioning.unrolled_recurrences import find_recurrences
from jaxamp.plan.dataflow.constraints import Pin, is_inexact
from jaxamp.plan.dataflow.magnitudes import STEEP, find_magnitudes
from jaxamp.plan.dataflow.provenance import LARGE, SOLVED, TINY, Facts
from jaxamp.plan.dataflow.regions import Interior
from jaxamp.plan.dataflow.uses import EXACTING, FRAGILE, Demand
from jaxamp.plan.graph.flags import union
from jaxamp.plan.graph.graph import Graph, Node
from jaxamp.policy.policy import PrecisionPolicy

DECAYS = Pin("multiplies a carry in every turn", Guard.LOOP_CARRY)
CARRIED = Pin("carried through equal turns", Guard.LOOP_CARRY)
WAVES = Pin("of its multiples sines are taken", Guard.SENSITIVE)
ORDERED = Pin("an index is picked by its order", Guard.SENSITIVE)
POWERS = Pin("an exponential is taken of its distance to another", Guard.SENSITIVE)
RAISED = Pin("mostly a known number", Guard.SENSITIVE)
CANCELS = Pin("what comes back by its squares and by its products cancels", Guard.SENSITIVE)


@dataclass(frozen=True, slots=True)
class Dangers:
    """What tells which values of a program would lose much in a narrow format.

    Attributes:
      facts: what each value is.
      demand: what each value is for.
      folded: per value, 1 if it is combined with parts of itself; see folds.py.
      poles: per value, flags for where what is made of it is infinite: at zero or elsewhere; see
        poles.py.
      magnitudes: per value, flags for how near to zero or how large it may be; see magnitudes.py.
      decays: values that a loop multiplies a carry by in every turn; see decays.py.
      distant: values whose squares and products nearly cancel; see distances.py.
      pinned: values for which one word is enough, and that; only under guards that are on.
      guards: those of the policy.
    """

    facts: Facts
    demand: Demand
    folded: bytearray
    poles: bytearray
    magnitudes: bytearray
    decays: Set[int]
    distant: Set[int]
    pinned: Mapping[int, Pin]
    guards: Set[Guard]

    def of(self, node: Node, outs: Sequence[int], low: Precision) -> Pin | None:
        """Why the results of a node have to stay in f32, if they would lose much.

        Args:
          node: what makes them.
          outs: those of its results that are ours.
          low: the narrow format.
        """
        facts, guards = self.facts, self.guards
        known, uses = union(facts.bits, outs), union(self.demand.bits, outs)
        if Guard.RANGE in guards:
            if known & (LARGE | TINY):
                return Pin(f"rests on a constant beyond {low.short}", Guard.RANGE)
            if low is Precision.F16 and node.trait is Trait.SENSITIVE:
                return Pin("may outgrow f16", Guard.RANGE)
            if low is Precision.F16 and union(self.magnitudes, outs) & STEEP:
                return Pin("divided by what may be small: may outgrow f16", Guard.RANGE)
        if Guard.EXACT_INTEGER in guards and any(is_inexact(facts, v, low) for v in outs):
            return Pin(f"whole numbers beyond {low.mantissa_bits} bits", Guard.EXACT_INTEGER)
        if Guard.SENSITIVE in guards and any(self.folded[v] for v in outs):
            return Pin("combined with parts of itself", Guard.SENSITIVE)
        for value in outs:
            if value in self.pinned:
                return self.pinned[value]
        near = union(self.poles, outs)
        if Guard.SENSITIVE in guards and near & AT_NUMBER:
            return Pin("rounded, it may be where what is made of it is infinite", Guard.SENSITIVE)
        if Guard.RANGE in guards and low is Precision.F16 and near & AT_ZERO:
            return Pin("divided by, and may be zero in f16", Guard.RANGE)
        if Guard.LOOP_CARRY in guards and uses & EXACTING:
            return Pin("decides when a loop stops", Guard.LOOP_CARRY)
        if Guard.NO_KERNEL in guards and (uses & FRAGILE or known & SOLVED):
            return Pin("belongs to a factorisation", Guard.NO_KERNEL)
        return None


def find_dangers(
    graph: Graph, facts: Facts, demand: Demand, interior: Interior, policy: PrecisionPolicy
) -> Dangers:
    """Runs the sweeps that look for what a narrow format would harm."""
    magnitudes = find_magnitudes(graph, facts)
    recurrences = find_recurrences(graph, facts)
    met = find_met(graph, facts, interior), find_weighed(graph, facts), find_moments(graph, facts)
    combined = list(chain.from_iterable(met))
    decays, distant = find_decays(graph, recurrences), find_distant(graph)
    sure: Sequence[tuple[Pin, Iterable[int]]] = (  # the first that holds of a value is said of it
        (DECAYS, decays),
        (CARRIED, (v for node, read in recurrences for v in (read, *node.outs))),
        (WAVES, find_coordinates(graph, facts)),
        (ORDERED, find_ordered(graph, demand)),
        (POWERS, find_exponents(graph, facts, interior)),
        (RAISED, find_raised(graph, facts)),
        (CANCELS, distant),
    )
    return Dangers(
        facts=facts,
        demand=demand,
        folded=find_folds(graph, facts, combined),
        poles=find_poles(graph, magnitudes),
        magnitudes=magnitudes,
        decays=decays,
        distant=distant,
        pinned={
            v: pin for pin, found in reversed(sure) if pin.guard in policy.guards for v in found
        },
        guards=policy.guards,
    )
