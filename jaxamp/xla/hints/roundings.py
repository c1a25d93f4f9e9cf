"""Find roundings that XLA must not remove or see, and values that it must not recompute.

XLA may remove a narrowing that a widening follows. It then stores the wide value for readers that
compute in float32, beside the narrow one for the others. A value that a loop both stacks in float32
and reads would be computed once for each.

See: https://github.com/openxla/xla/issues/41605
"""

from __future__ import annotations

from collections.abc import Set

from jaxamp.core.formats import Precision, is_narrow
from jaxamp.plan.findings import Findings
from jaxamp.plan.graph.graph import Graph, Link, Node, Role


def find_barriered_roundings(findings: Findings) -> frozenset[int]:
    """Return values rounded from float32 arithmetic, or stacked, that float32 arithmetic reads."""
    graph, stored, choices = findings.graph, findings.stored, findings.choices
    forget_gates = findings.hazards.forget_gates
    return frozenset(
        value
        for node in graph.nodes
        if node.role is Role.ELEMENTWISE and choices[node].operand is Precision.F32
        for value in node.outs
        if is_narrow(stored[value]) or (value in forget_gates and _is_stacked(graph, value))
        if any(choices[r].operand is Precision.F32 for r in graph.readers[value])
    )


def _is_stacked(graph: Graph, value: int) -> bool:
    return any(reader.link is Link.STACK for reader in graph.readers[value])


def find_unbarriered_sums(findings: Findings, barriered: Set[int]) -> frozenset[Node]:
    """Return nodes that sum barriered values, or square them for a sum.

    A sum computed beside its summands need not wait for them to be in memory. It has to where
    products of the value are summed as well, as in the backward pass of a batch norm: one kernel
    then computes all of these sums.
    """
    graph, choices = findings.graph, findings.choices
    summed: set[Node] = set()
    for value in barriered:
        readers = [r for r in graph.readers[value] if choices[r].operand is Precision.F32]
        alone = {r for r in readers if _sums(r) or _squares_for_sum(graph, r)}
        others = [r for r in readers if r not in alone]
        if not any(_is_summed(graph, r) for r in others):
            summed |= alone
    return frozenset(summed)


def _sums(node: Node) -> bool:
    return node.name == "reduce_sum"


def _squares_for_sum(graph: Graph, node: Node) -> bool:
    return len(set(node.ins)) == 1 and _is_summed(graph, node)


def _is_summed(graph: Graph, node: Node) -> bool:
    """Return whether an elementwise operation's results are read by sums only."""
    readers = [r for v in node.outs for r in graph.readers[v]]
    return node.role is Role.ELEMENTWISE and bool(readers) and all(map(_sums, readers))


def find_reversed_weights(findings: Findings) -> dict[Node, Precision]:
    """Return reversals whose float32 operand is also read rounded, and to what.

    XLA:GPU recognizes the gradient of a convolution with respect to its input by the reversed
    weights, but only if nothing, such as a rounding, stands between the reversal and the
    convolution.

    See: ``MatchBackwardInput`` in ``xla/service/gpu/transforms/conv_rewriter.cc``; what it is
    worth: ``python -m benchmarks.techniques --target h200 --model resnet50 --only all
    reversed-weights``.
    """
    low = findings.policy.base
    if not is_narrow(low):
        return {}
    return {node: low for node in findings.graph.named.get("rev", ()) if _is_weight(findings, node)}


def _is_weight(findings: Findings, node: Node) -> bool:
    (out,) = node.outs
    is_wide = findings.readings.own_cast[out] and findings.stored[out] is Precision.F32
    readers = findings.graph.readers[out]
    return bool(is_wide) and any(reader.role is Role.CONTRACT for reader in readers)
