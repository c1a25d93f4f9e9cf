"""Decide which loop carries are lowered, together with provenance and uses that depend on it."""

from __future__ import annotations

from jaxamp.core.formats import Precision
from jaxamp.core.guards import Guard
from jaxamp.core.taxonomy import OpKind, Trait
from jaxamp.plan.dataflow.constraints import constrain_contraction
from jaxamp.plan.dataflow.provenance import LARGE, SOLVED, Provenance, find_provenance
from jaxamp.plan.dataflow.repeated_decisions import find_repeated
from jaxamp.plan.dataflow.uses import Lowerable, Uses, find_uses
from jaxamp.plan.graph.consumers import descendants, is_movement
from jaxamp.plan.graph.graph import Carry, Graph, Link, Node, Role
from jaxamp.plan.graph.sweeps import mark, union
from jaxamp.plan.precision.choose import narrow_kinds
from jaxamp.plan.precision.overrides import Forced
from jaxamp.policy.policy import PrecisionPolicy


def settle_carries(
    graph: Graph, policy: PrecisionPolicy, forced: Forced
) -> tuple[Provenance, Uses]:
    """Assume every carry lowered, and keep the dtype of unsafe ones until nothing changes.

    Keeping one more carry only ever removes reasons to lower others, so this terminates. It writes
    `keeps_dtype` of the carries, and returns provenance and uses of all values, these settled.
    """
    if Guard.LOOP_CARRY not in policy.guards or narrow_kinds(policy)[OpKind.ELEMENTWISE] is None:
        for carry in graph.carries:
            carry.keeps_dtype = True
    _find_gated(graph)
    repeated, no_gain = frozenset[int](), Guard.NO_GAIN in policy.guards
    while True:
        provenance = find_provenance(graph, policy.low)
        for carry in graph.carries:
            carry.keeps_dtype |= bool(provenance.state[carry.init])
        kept = [carry.keeps_dtype for carry in graph.carries]
        may_lower = _lowering(graph, provenance, policy, forced)
        uses = find_uses(graph, provenance, may_lower, repeated, no_gain=no_gain)
        for carry in graph.carries:
            carry.keeps_dtype = carry.keeps_dtype or not _is_safe(graph, provenance, uses, carry)
        more = find_repeated(graph, uses) if Guard.LOOP_CARRY in policy.guards else repeated
        if kept == [carry.keeps_dtype for carry in graph.carries] and more <= repeated:
            return provenance, uses
        repeated |= more


_ADDED, _CURVED = 1, 2


def _find_gated(graph: Graph) -> None:
    """Enter carries to which no result of Compute is added but through a curve: gated units.

    `h = (1 - z) * n + z * h`. Such a state of float32 is no parameter under training: products
    whose results curves read for the next state are read by the products that read the state.
    """
    made = bytearray(len(graph.avals))  # per value, of what else than a state it is made
    mark(made, graph.sources, _ADDED)
    for node in graph.nodes if graph.carries else ():
        if node.link is Link.INIT or node.link is Link.BACK:
            continue
        flags = union(made, node.ins) if node.is_elementwise else _ADDED
        flags = _CURVED if node.trait is Trait.SMOOTH else flags
        mark(made, filter(graph.is_float32.__getitem__, node.outs), flags)
    found = (carry for carry in graph.carries if made[carry.out] == _CURVED)
    graph.gated.update(v for carry in found for v in (carry.inner, carry.result))


def _lowering(
    graph: Graph, provenance: Provenance, policy: PrecisionPolicy, forced: Forced
) -> Lowerable:
    """Return a predicate: whether a Compute node would be lowered, given its results' flags."""
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
    """Return whether a carry may be stored narrow."""
    return _is_activation(provenance, uses, carry) and _bears_rounding(
        graph, provenance, uses, carry
    )


def _is_activation(provenance: Provenance, uses: Uses, carry: Carry) -> bool:
    """Return whether a carry is a computed value, and Compute in the body reads it.

    A parameter under training is read by Compute too, but starts as state or ends as a result.
    """
    return bool(
        provenance.dense[carry.out]
        and uses.reaches[carry.inner]
        and not uses.escapes[carry.result]
        and not uses.stops_loop[carry.inner]
        and not provenance.bits[carry.inner] & (LARGE | SOLVED)
    )


def _bears_rounding(graph: Graph, provenance: Provenance, uses: Uses, carry: Carry) -> bool:
    """Return whether rounding a carry in every iteration is harmless: Compute recomputes it.

    A recurrent state is recomputed, and so is a residual stream: increments are added to it, but by
    another layer in each iteration, whose weights are slices of stacked ones. Rounding harms
    accumulators, to which the same step adds repeatedly (a clock, an average, an integrator), as
    the errors add up. It harms results that no Compute reads, as a loss may be the small difference
    of such a result and a target. And it harms coordinates whose differences the step reads, and
    sums of which terms are subtracted later.
    """
    is_returned = uses.needed[carry.result] and not uses.reaches[carry.result]
    if is_returned or carry.inner in graph.undone or _has_differences(graph, carry):
        return False
    contractions = _contractions_of(graph, carry)
    layers = [node for node in contractions if any(provenance.layer[v] for v in node.ins)]
    is_layered = any(_leads_to(graph, node, carry.out) for node in layers)
    is_added_to = carry.out in descendants(graph, carry.inner, _is_elementwise_or_inward)
    return is_layered or (bool(contractions) and not is_added_to)


def _has_differences(graph: Graph, carry: Carry) -> bool:
    """Return whether parts of a carry are subtracted from each other before any arithmetic."""
    moved = set(descendants(graph, carry.inner, is_movement))
    differences = (r for v in moved for r in graph.readers[v] if r.name == "sub")
    return any(r.ins[0] != r.ins[1] and moved.issuperset(r.ins) for r in differences)


def _contractions_of(graph: Graph, carry: Carry) -> list[Node]:
    """Return the body's Compute nodes that read a carry in the iteration in which it arrives."""
    read = descendants(graph, carry.inner, _precedes_contraction)
    nodes = {node: None for value in read for node in graph.readers[value]}
    return [node for node in nodes if node.role is Role.CONTRACT]


def _leads_to(graph: Graph, node: Node, value: int) -> bool:
    """Return whether a value depends on a node's results within one iteration."""

    def passes(other: Node) -> bool:
        return other.link is not Link.BACK

    return any(value in descendants(graph, out, passes) for out in node.outs)


_INWARD = (Link.INVARIANT, Link.SLICE, Link.INIT)  # into a nested loop


def _is_elementwise_or_inward(node: Node) -> bool:
    """Return whether a node is elementwise, moves values, or passes them to an inner loop."""
    return node.is_elementwise or node.link in _INWARD


def _precedes_contraction(node: Node) -> bool:
    return _is_elementwise_or_inward(node) or node.role is Role.REDUCE
