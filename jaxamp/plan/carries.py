"""Which loop carries may be lowered, together with the facts and demands that follow from it."""

from __future__ import annotations

from jaxamp.formats import Precision
from jaxamp.guards import Guard
from jaxamp.plan.choose import narrow_kinds
from jaxamp.plan.demand import Demand, find_demand
from jaxamp.plan.facts import Facts, Range, find_facts
from jaxamp.plan.forced import Forced
from jaxamp.plan.graph import Carry, Graph, Link, Node, Role
from jaxamp.plan.pins import pin_contraction
from jaxamp.policy import PrecisionPolicy
from jaxamp.taxonomy import OpKind, Trait


def settle_carries(graph: Graph, policy: PrecisionPolicy, forced: Forced) -> tuple[Facts, Demand]:
    """Supposes every carry lowered, and keeps those for which that proves unsafe, until all agree.

    Keeping one more carry only ever takes reasons to lower away from others, so this ends.
    """
    narrow = narrow_kinds(policy)
    if Guard.LOOP_CARRY not in policy.guards or narrow[OpKind.ELEMENTWISE] is None:
        for carry in graph.carries:
            carry.kept = True
    low = narrow[OpKind.COMPUTE]
    while True:
        facts = find_facts(graph, _limits(policy))

        def may_lower(node: Node, uses: int, facts: Facts = facts) -> bool:
            precision, _ = forced.of(node)
            if precision is not None:
                return precision.bits < Precision.F32.bits
            return low is not None and not pin_contraction(graph, facts, uses, policy, node, low)

        demand = find_demand(graph, facts, may_lower, no_gain=Guard.NO_GAIN in policy.guards)
        unsafe = [
            c
            for c in graph.carries
            if not c.kept
            and not (
                _is_activation(graph, facts, demand, c) and _is_stream(graph, facts, demand, c)
            )
        ]
        if not unsafe:
            return facts, demand
        for carry in unsafe:
            carry.kept = True


def _is_activation(graph: Graph, facts: Facts, demand: Demand, carry: Carry) -> bool:
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


def _is_stream(graph: Graph, facts: Facts, demand: Demand, carry: Carry) -> bool:
    """Whether Compute reads the carry in each turn, and rounding it in each turn does no harm.

    It does harm where the carry is added to again and again by the same step: a clock, an
    average, an integrator. A residual stream is added to as well, but each turn is another layer:
    its weights are among what makes the carry anew. What is read beside it is data.
    And it does harm where what the carry ends as is neither for Compute nor for a sum: a loss may
    be the small difference of it and a target.
    """
    readers = _contractions_of(graph, carry)
    layers = [node for node in readers if any(facts.layer[v] for v in node.ins)]
    is_layered = any(_leads_to(graph, node, carry.out) for node in layers)
    unused = not graph.uses[carry.result] and carry.result not in graph.outputs
    if not (demand.reaches[carry.result] or unused):
        return is_layered and _is_summed(graph, carry.result)
    return is_layered or bool(readers and carry.out not in _reachable(graph, carry.inner, _PASSES))


def _is_summed(graph: Graph, value: int) -> bool:
    """Whether all that reads a value adds up many of its elements, as a gradient does."""
    return all(
        all(_is_summed(graph, out) for out in reader.outs)
        if reader.role is Role.MOVE
        else reader.role is Role.REDUCE and reader.trait is Trait.SUM
        for reader in graph.uses[value]
    )


_PASSES = (Role.ELEMENTWISE, Role.MOVE, Role.MERGE)
_ALL = tuple(role for role in Role if role is not Role.LINK)
_INWARD = (Link.INVARIANT, Link.SLICE, Link.INIT)
_ONWARD = tuple(link for link in Link if link is not Link.BACK)


def _contractions_of(graph: Graph, carry: Carry) -> list[Node]:
    """The Compute nodes of the body that read a carry in the turn in which it arrives."""
    reached = _reachable(graph, carry.inner, (*_PASSES, Role.REDUCE))
    nodes = {node: None for value in reached for node in graph.uses[value]}
    return [node for node in nodes if node.role is Role.CONTRACT]


def _leads_to(graph: Graph, node: Node, value: int) -> bool:
    """Whether a value follows from a node, within one turn of the loop."""
    return any(value in _reachable(graph, out, _ALL, _ONWARD) for out in node.outs)


def _reachable(
    graph: Graph, start: int, through: tuple[Role, ...], links: tuple[Link, ...] = _INWARD
) -> set[int]:
    """Values that follow from one through nodes of some roles, within one turn of the loop."""
    reached, pending = {start}, [start]
    while pending:
        for node in graph.uses[pending.pop()]:
            if node.role in through or node.link in links:
                new = [v for v in node.outs if v not in reached]
                reached.update(new)
                pending.extend(new)
    return reached


def _limits(policy: PrecisionPolicy) -> Range:
    formats = policy.low
    return Range(
        largest=min((p.max for p in formats), default=float("inf")),
        smallest=max((p.smallest_normal for p in formats), default=0.0),
    )
