"""Which loop carries may be lowered, together with the facts and demands that follow from it."""

from __future__ import annotations

from jaxamp.core.formats import Precision
from jaxamp.core.guards import Guard
from jaxamp.core.taxonomy import OpKind, Trait
from jaxamp.plan.dataflow.constraints import pin_contraction
from jaxamp.plan.dataflow.provenance import Facts, Range, find_facts
from jaxamp.plan.dataflow.uses import Demand, Lowerable, find_demand
from jaxamp.plan.graph.consumers import descendants, is_movement
from jaxamp.plan.graph.graph import Carry, Graph, Link, Node, Role
from jaxamp.plan.precision.choose import narrow_kinds
from jaxamp.plan.precision.overrides import Forced
from jaxamp.policy.policy import PrecisionPolicy


def settle_carries(graph: Graph, policy: PrecisionPolicy, forced: Forced) -> tuple[Facts, Demand]:
    """Supposes every carry lowered, and keeps those for which that proves unsafe, until all agree.

    Keeping one more carry only ever takes reasons to lower away from others, so this ends.

    Args:
      graph: the program; ``kept`` of its carries is written.
      policy: what is applied to it.
      forced: what the user has decided of its nodes.

    Returns:
      The facts and demands of all values, with the carries as they were settled.
    """
    if Guard.LOOP_CARRY not in policy.guards or narrow_kinds(policy)[OpKind.ELEMENTWISE] is None:
        for carry in graph.carries:
            carry.kept = True
    for carry in graph.carries:
        carry.kept |= carry.init in graph.sources  # state, and so unsafe whatever is found
    while True:
        facts = find_facts(graph, _limits(policy))
        may_lower = _lowering(graph, facts, policy, forced)
        demand = find_demand(graph, facts, may_lower, no_gain=Guard.NO_GAIN in policy.guards)
        unsafe = [
            carry
            for carry in graph.carries
            if not carry.kept and not _is_safe(graph, facts, demand, carry)
        ]
        if not unsafe:
            return facts, demand
        for carry in unsafe:
            carry.kept = True


def _lowering(graph: Graph, facts: Facts, policy: PrecisionPolicy, forced: Forced) -> Lowerable:
    """What tells whether a Compute node would be lowered, given the flags of its results."""
    low = narrow_kinds(policy)[OpKind.COMPUTE]

    def may_lower(node: Node, uses: int) -> bool:
        precision, _ = forced.of(node)
        if precision is not None:
            return precision.bits < Precision.F32.bits
        return low is not None and not pin_contraction(graph, facts, uses, policy, node, low)

    return may_lower


def _is_safe(graph: Graph, facts: Facts, demand: Demand, carry: Carry) -> bool:
    """Whether a carry may be stored narrow."""
    return _is_activation(facts, demand, carry) and _bears_rounding(graph, facts, demand, carry)


def _is_activation(facts: Facts, demand: Demand, carry: Carry) -> bool:
    """Whether a carry starts as a computed value, and is read by Compute in the body.

    A parameter under training is read by Compute too, but starts as an input or ends as a result.
    """
    return bool(
        not facts.state[carry.init]
        and facts.dense[carry.out]
        and demand.reaches[carry.inner]
        and not demand.escapes[carry.result]
        and not demand.exacting[carry.inner]
        and not facts.large[carry.inner]
        and not facts.solved[carry.inner]
    )


def _bears_rounding(graph: Graph, facts: Facts, demand: Demand, carry: Carry) -> bool:
    """Whether Compute makes a carry anew in each turn, so that rounding it there does no harm.

    A recurrent state is made anew, and so is a residual stream: it is added to, but by another
    layer in each turn, whose weights are slices of stacked ones. Rounding harms what the same step
    is added to again and again (a clock, an average, an integrator), as the errors add up. And it
    harms what ends neither in Compute nor in a sum, as a loss may be the small difference of that
    and a target. Nor may coordinates be rounded of which the step reads how far apart they are.
    """
    if _is_told_apart(graph, carry):
        return False
    contractions = _contractions_of(graph, carry)
    layers = [node for node in contractions if any(facts.layer[v] for v in node.ins)]
    is_layered = any(_leads_to(graph, node, carry.out) for node in layers)
    if demand.needed[carry.result] and not demand.reaches[carry.result]:
        return is_layered and _is_summed(graph, carry.result)
    is_added_to = carry.out in descendants(graph, carry.inner, _computes_each)
    return is_layered or (bool(contractions) and not is_added_to)


def _is_told_apart(graph: Graph, carry: Carry) -> bool:
    """Whether parts of a carry are subtracted from others, moved but otherwise as they arrive."""
    moved = set(descendants(graph, carry.inner, is_movement))
    differences = (r for v in moved for r in graph.uses[v] if r.name == "sub")
    return any(r.ins[0] != r.ins[1] and moved.issuperset(r.ins) for r in differences)


def _is_summed(graph: Graph, value: int) -> bool:
    """Whether all that reads a value, moved or not, adds up many of its elements."""
    readers = [r for v in descendants(graph, value, is_movement) for r in graph.uses[v]]
    return all(is_movement(r) or (r.role is Role.REDUCE and r.trait is Trait.SUM) for r in readers)


def _contractions_of(graph: Graph, carry: Carry) -> list[Node]:
    """The Compute nodes of the body that read a carry in the turn in which it arrives."""
    read = descendants(graph, carry.inner, _precedes_contraction)
    nodes = {node: None for value in read for node in graph.uses[value]}
    return [node for node in nodes if node.role is Role.CONTRACT]


def _leads_to(graph: Graph, node: Node, value: int) -> bool:
    """Whether a value is made of what a node makes, within one turn of the loop."""
    return any(value in descendants(graph, out, _is_within_turn) for out in node.outs)


_ONE_BY_ONE = (Role.ELEMENTWISE, Role.MOVE, Role.MERGE)
_INWARD = (Link.INVARIANT, Link.SLICE, Link.INIT)  # from the body into a loop inside it


def _computes_each(node: Node) -> bool:
    """Whether a node computes number by number, moves, or hands to an inner loop."""
    return node.role in _ONE_BY_ONE or node.link in _INWARD


def _precedes_contraction(node: Node) -> bool:
    return _computes_each(node) or node.role is Role.REDUCE


def _is_within_turn(node: Node) -> bool:
    return node.link is not Link.BACK


def _limits(policy: PrecisionPolicy) -> Range:
    """The numbers that every narrow format of a policy holds in full accuracy."""
    formats = policy.low
    return Range(
        largest=min((p.max for p in formats), default=float("inf")),
        smallest=max((p.smallest_normal for p in formats), default=0.0),
    )
