"""Which loop carries may be lowered, together with the facts and demands that follow from it."""

from __future__ import annotations

from jaxamp.formats import Precision
from jaxamp.plan.choose import narrow_kinds, pin_contraction
from jaxamp.plan.demand import Demand, find_demand
from jaxamp.plan.facts import Facts, Range, find_facts
from jaxamp.plan.forced import Forced
from jaxamp.plan.graph import Carry, Graph, Node
from jaxamp.policy import Guard, PrecisionPolicy
from jaxamp.taxonomy import OpKind


def settle_carries(graph: Graph, policy: PrecisionPolicy, forced: Forced) -> tuple[Facts, Demand]:
    """Supposes every carry lowered, and keeps those for which that proves unsafe, until all agree.

    Keeping one more carry only ever takes reasons to lower away from others, so this ends.
    """
    narrow = narrow_kinds(policy)
    if Guard.LOOP_CARRY not in policy.guards or narrow[OpKind.ELEMENTWISE] is None:
        for carry in graph.carries:
            carry.kept = True
    facts = find_facts(graph, _limits(policy))
    low = narrow[OpKind.COMPUTE]

    def may_lower(node: Node, demand: Demand) -> bool:
        precision, _ = forced.of(node)
        if precision is not None:
            return precision.bits < Precision.F32.bits
        return low is not None and not pin_contraction(graph, facts, demand, policy, node, low)

    while True:
        no_gain = Guard.NO_GAIN in policy.guards
        demand = find_demand(graph, facts, may_lower, no_gain=no_gain)
        unsafe = [c for c in graph.carries if not c.kept and not _is_stream(facts, demand, c)]
        if not unsafe:
            return facts, demand
        for carry in unsafe:
            carry.kept = True


def _is_stream(facts: Facts, demand: Demand, carry: Carry) -> bool:
    """Whether a carry is an activation that Compute reads in the loop, and only Compute after it.

    A parameter under training is read by Compute too, but starts as an input or ends as a result.
    """
    return bool(
        not facts.state[carry.init]
        and facts.dense[carry.out]
        and demand.reaches[carry.inner]
        and demand.reaches[carry.result]
        and not demand.escapes[carry.result]
        and not demand.exacting[carry.inner]
        and not facts.large[carry.inner]
        and not facts.solved[carry.inner]
    )


def _limits(policy: PrecisionPolicy) -> Range:
    formats = policy.low
    return Range(
        largest=min((p.max for p in formats), default=float("inf")),
        smallest=max((p.smallest_normal for p in formats), default=0.0),
    )
