"""Which loop carries may be lowered, together with the facts and demands that follow from it."""

from __future__ import annotations

from jaxamp.core.formats import Precision
from jaxamp.core.guards import Guard
from jaxamp.core.taxonomy import OpKind, Trait
from jaxamp.plan.dataflow.constraints import constrain_contraction
from jaxamp.plan.dataflow.provenance import Provenance, Range, find_provenance
from jaxamp.plan.dataflow.uses import Lowerable, Uses, find_uses
from jaxamp.plan.graph.consumers import descendants, is_movement
from jaxamp.plan.graph.graph import Carry, Graph, Link, Node, Role
from jaxamp.plan.precision.choose import narrow_kinds
from jaxamp.plan.precision.overrides import Forced
from jaxamp.policy.policy import PrecisionPolicy


def settle_carries(
    graph: Graph, policy: PrecisionPolicy, forced: Forced
) -> tuple[Provenance, Uses]:
    """Supposes every carry lowered, and keeps those for which that proves unsafe, until all agree.

    Keeping one more carry only ever takes reasons to lower away from others, so this ends.

    Args:
      graph: the program; ``keeps_dtype`` of its carries is written.
      policy: what is applied to it.
      forced: what the user has decided of its nodes.

    Returns:
      The facts and demands of all values, with the carries as they were settled.
    """
    if Guard.LOOP_CARRY not in policy.guards or narrow_kinds(policy)[OpKind.ELEMENTWISE] is None:
        for carry in graph.carries:
            carry.keeps_dtype = True
    for carry in graph.carries:
        carry.keeps_dtype |= carry.init in graph.sources  # state, and so unsafe whatever is found
    while True:
        provenance = find_provenance(graph, _limits(policy))
        may_lower = _lowering(graph, provenance, policy, forced)
        uses = find_uses(graph, provenance, may_lower, no_gain=Guard.NO_GAIN in policy.guards)
        unsafe = [
            carry
            for carry in graph.carries
            if not carry.keeps_dtype and not _is_safe(graph, provenance, uses, carry)
        ]
        if not unsafe:
            return provenance, uses
        for carry in unsafe:
            carry.keeps_dtype = True


def _lowering(
    graph: Graph, provenance: Provenance, policy: PrecisionPolicy, forced: Forced
) -> Lowerable:
    """What tells whether a Compute node would be lowered, given the flags of its results."""
    low = narrow_kinds(policy)[OpKind.COMPUTE]

    def may_lower(node: Node, uses: int) -> bool:
        precision, _ = forced.of(node)
        if precision is not None:
            return precision.bits < Precision.F32.bits
        return low is not None and not constrain_contraction(
            graph, provenance, uses, policy, node, low
        )

    return may_lower


def _is_safe(graph: Graph, provenance: Provenance, uses: Uses, carry: Carry) -> bool:
    """Whether a carry may be stored narrow."""
    return _is_activation(provenance, uses, carry) and _bears_rounding(
        graph, provenance, uses, carry
    )


def _is_activation(provenance: Provenance, uses: Uses, carry: Carry) -> bool:
    """Whether a carry starts as a computed value, and is read by Compute in the body.

    A parameter under training is read by Compute too, but starts as an input or ends as a result.
    """
    return bool(
        not provenance.state[carry.init]
        and provenance.dense[carry.out]
        and uses.reaches[carry.inner]
        and not uses.escapes[carry.result]
        and not uses.exacting[carry.inner]
        and not provenance.large[carry.inner]
        and not provenance.solved[carry.inner]
    )


def _bears_rounding(graph: Graph, provenance: Provenance, uses: Uses, carry: Carry) -> bool:
    """Whether Compute makes a carry anew in each turn, so that rounding it there does no harm.

    A recurrent state is made anew, and so is a residual stream: it is added to, but by another
    layer in each turn, whose weights are slices of stacked ones. Rounding harms what the same step
    is added to again and again (a clock, an average, an integrator), as the errors add up. And it
    harms what ends neither in Compute nor in a sum, as a loss may be the small difference of that
    and a target. Nor may coordinates be rounded of which the step reads how far apart they are.
    """
    if _has_differences(graph, carry):
        return False
    contractions = _contractions_of(graph, carry)
    layers = [node for node in contractions if any(provenance.layer[v] for v in node.ins)]
    is_layered = any(_leads_to(graph, node, carry.out) for node in layers)
    if uses.needed[carry.result] and not uses.reaches[carry.result]:
        return is_layered and _is_summed(graph, carry.result)
    is_added_to = carry.out in descendants(graph, carry.inner, _computes_each)
    return is_layered or (bool(contractions) and not is_added_to)


def _has_differences(graph: Graph, carry: Carry) -> bool:
    """Whether parts of a carry are subtracted from others, moved but otherwise as they arrive."""
    moved = set(descendants(graph, carry.inner, is_movement))
    differences = (r for v in moved for r in graph.readers[v] if r.name == "sub")
    return any(r.ins[0] != r.ins[1] and moved.issuperset(r.ins) for r in differences)


def _is_summed(graph: Graph, value: int) -> bool:
    """Whether all that reads a value, moved or not, adds up many of its elements."""
    readers = [r for v in descendants(graph, value, is_movement) for r in graph.readers[v]]
    return all(is_movement(r) or (r.role is Role.REDUCE and r.trait is Trait.SUM) for r in readers)


def _contractions_of(graph: Graph, carry: Carry) -> list[Node]:
    """The Compute nodes of the body that read a carry in the turn in which it arrives."""
    read = descendants(graph, carry.inner, _precedes_contraction)
    nodes = {node: None for value in read for node in graph.readers[value]}
    return [node for node in nodes if node.role is Role.CONTRACT]


def _leads_to(graph: Graph, node: Node, value: int) -> bool:
    """Whether a value is made of what a node makes, within one turn of the loop."""
    return any(value in descendants(graph, out, _is_within_iteration) for out in node.outs)


_ONE_BY_ONE = (Role.ELEMENTWISE, Role.MOVE, Role.MERGE)
_INWARD = (Link.INVARIANT, Link.SLICE, Link.INIT)  # from the body into a loop inside it


def _computes_each(node: Node) -> bool:
    """Whether a node computes number by number, moves, or hands to an inner loop."""
    return node.role in _ONE_BY_ONE or node.link in _INWARD


def _precedes_contraction(node: Node) -> bool:
    return _computes_each(node) or node.role is Role.REDUCE


def _is_within_iteration(node: Node) -> bool:
    return node.link is not Link.BACK


def _limits(policy: PrecisionPolicy) -> Range:
    """The numbers that every narrow format of a policy holds in full accuracy."""
    formats = policy.low
    return Range(
        largest=min((p.max for p in formats), default=float("inf")),
        smallest=max((p.smallest_normal for p in formats), default=0.0),
    )
