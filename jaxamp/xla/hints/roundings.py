"""Find roundings that XLA must not remove or see, and values that it must not recompute.

XLA may remove a narrowing that a widening follows. It then stores the wide value for readers that
compute in float32, beside the narrow one for the others. A value that a loop both stacks in float32
and reads would be computed once for each.

A sum of an activation and what is broadcast to it, a parameter or a smaller activation, is fused,
so it is float32, and so is its cotangent. That has two readers: the activation's, which is rounded
as the activation is stored, and the other's, which another kernel reduces over rows. Unless the
reduction reads the rounding as well, the float32 cotangent is written to memory for it. The same
holds behind a norm that is read by an exponential or the like, where a parameter scales it, too,
and behind a batch norm that several operations read (a leaky ReLU, `x * hard_sigmoid(x)`): the
cotangent is reduced, read again after that, and too costly to be computed twice. And it holds for
a sum of several products, of matrices or of activations and a parameter each, as of shifted taps.

See: https://github.com/openxla/xla/issues/41605
"""

from __future__ import annotations

from collections.abc import Callable, Set

from jaxamp.core.formats import Precision, is_narrow
from jaxamp.jaxprs.contracted import multiplies_by_vector
from jaxamp.plan.dataflow.regions import ARITHMETIC, COSTLY, is_window
from jaxamp.plan.decision import CotangentRounding
from jaxamp.plan.findings import Findings
from jaxamp.plan.graph.consumers import SUMS, find_parts, is_square, read_for_results
from jaxamp.plan.graph.graph import Link, Node, Role, is_smaller
from jaxamp.plan.graph.sweeps import union


def find_barriered_roundings(findings: Findings) -> frozenset[int]:
    """Return values rounded from float32 arithmetic, or stacked, that float32 arithmetic reads.

    Products with one vector in each batch are such arithmetic: XLA transposes what they add up. And
    results of ReLUs of narrow arrays whose sign is read: XLA would read that of the operand in
    their place, and store both.
    """
    graph, stored, choices = findings.flow.graph, findings.stored, findings.choices
    forget_gates, regions = findings.hazards.forget_gates, findings.flow.regions
    signed = frozenset(
        node.outs[0]
        for node in graph.named.get("max", ())
        if is_narrow(choices[node].operand)
        and not regions.sign_tests.isdisjoint(graph.readers[node.outs[0]])
    )
    return signed | frozenset(
        value
        for node in graph.nodes
        if node.role is Role.ELEMENTWISE and choices[node].operand is Precision.F32
        for value in node.outs
        if is_narrow(stored[value])
        or (value in forget_gates and any(r.link is Link.STACK for r in graph.readers[value]))
        if any(_reads_wide(findings, r) for r in graph.readers[value])
    )


def find_unbarriered_reads(findings: Findings, barriered: Set[int]) -> frozenset[Node]:
    """Return nodes that read barriered values as float32, products with vectors among them.

    They are fused with what computes the value, where that is cheaper than to read it from memory.
    """
    readers = findings.flow.graph.readers
    found = (r for value in barriered for r in readers[value])
    return frozenset(r for r in found if _reads_wide(findings, r) or multiplies_by_vector(r.eqn))


def _reads_wide(findings: Findings, node: Node) -> bool:
    """Return whether a node computes in float32, or moves what it widens for others that do."""
    moves_wide = findings.groups is not None and node in findings.groups.widened
    is_wide = moves_wide or findings.choices[node].operand is Precision.F32
    return is_wide or multiplies_by_vector(node.eqn, in_batches=True)


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
    reversals = findings.flow.graph.named.get("rev", ())
    return {node: low for node in reversals if _is_weight(findings, node)}


def _is_weight(findings: Findings, node: Node) -> bool:
    (out,) = node.outs
    is_wide = findings.readings.own_cast[out] and findings.stored[out] is Precision.F32
    return bool(is_wide) and any(r.role is Role.CONTRACT for r in findings.flow.graph.readers[out])


def find_cotangent_roundings(findings: Findings) -> dict[int, CotangentRounding]:
    """Return how the cotangent of each such sum is rounded."""
    graph, provenance, _, regions = findings.flow
    stored, made = findings.stored, findings.readings.made

    def is_parameter(value: int, size: int) -> bool:
        return bool(made[value] or provenance.layer[value]) and graph.sizes[value] != size

    def is_shared(value: int, size: int) -> bool:
        return is_narrow(stored[value]) and is_smaller(graph.sizes[value], size)

    moves = (pair for node in graph.nodes if node.role is Role.MOVE for pair in node.moves)
    spread = {out for source, out in moves if is_parameter(source, graph.sizes[out])}

    def others(node: Node) -> list[int]:
        """Return the operands that are no parameters broadcast along what the node computes."""
        size = graph.sizes[node.outs[0]]
        return [v for v in node.ins if v not in spread and not is_parameter(v, size)]

    roundings = {}
    normalized = _find_normalized(findings)
    of_products = _find_sums_of_products(findings, others)
    scaled = set(normalized)  # products whose cotangent no later sum has rounded
    for node in reversed(graph.nodes):
        is_found = node.name in SUMS or (node.name == "mul" and node.outs[0] in scaled)
        if not is_found or not any(
            stored[v] is Precision.F32 or v in regions.bias_sums for v in node.outs
        ):
            continue
        (out,), size = node.outs, graph.sizes[node.outs[0]]
        found = [v for v in others(node) if not is_shared(graph.origin(v), size)]
        whole = [v for v in found if provenance.dense[v] and graph.sizes[v] == size]
        if whole and (out in of_products or len(found) == 1):
            low, held = stored[whole[0]], (node.ins.index(whole[0]),)
            if out in of_products:  # each of which reads memory
                low, held = findings.narrow, (0, 1)
            elif out in normalized:
                low, held = findings.narrow, ()
            if is_narrow(low):
                roundings[out] = CotangentRounding(low, held)
                scaled.difference_update(node.ins)
    return roundings


def _find_sums_of_products(findings: Findings, others: Callable[[Node], list[int]]) -> set[int]:
    """Return whole sums of several narrow products, without a bias, that nothing else reads.

    So none is a residual stream, on which a later product depends, nor what a loop adds up.
    """
    graph, provenance, _, _ = findings.flow

    def product(node: Node) -> tuple[int, ...] | None:
        if node.role is Role.CONTRACT:
            return node.outs if is_narrow(findings.choices[node].operand) else None
        factors = [provenance.dense[v] for v in others(node)] if node.name == "mul" else []
        return node.outs if factors == [1] else None

    def adds_up(node: Node) -> bool:
        is_sum = node.name in SUMS and others(node) == [*node.ins]
        return is_sum and all(len(graph.readers[v]) == 1 for v in node.ins)

    parts = find_parts(graph, product, adds_up)
    added = {v for n in graph.nodes if n.name in SUMS or n.link is Link.BACK for v in n.ins}
    return {v for v, found in parts.items() if len(found) > 1 and v not in added}


def _find_normalized(findings: Findings) -> set[int]:
    """Return fused values that depend on a reduction, and that costly operations read.

    Or several do, and all rows are reduced: else it is cheap to compute them again. Products that
    are not rounded, such as those of distances, read cotangents that are not, either.
    """
    graph, provenance, stored = findings.flow.graph, findings.flow.provenance, findings.stored
    # 1 is reduced, 2 by all rows, 4 made by a float32 product; `read` has a cotangent already.
    reduced, costly, read = (bytearray(len(graph.avals)) for _ in range(3))
    for node in graph.nodes:
        own = 0
        if node.role is Role.REDUCE and not is_window(graph, node):
            own = 3 if 0 in node.eqn.params.get("axes", ()) else 1
        elif node.role is Role.CONTRACT:
            own = 4 * (findings.choices[node].operand is Precision.F32)
        is_found = own or (node.role in ARITHMETIC and union(reduced, node.ins))
        for value, parts in read_for_results(node) if is_found else ():
            found = own or union(reduced, parts)
            reduced[value] = found * (stored[value] is Precision.F32)
    for node in reversed(graph.nodes):
        is_made = node.role in ARITHMETIC and union(provenance.dense, node.outs)
        if not is_made or not union(graph.is_float32, node.outs):
            continue
        is_costly = (node.trait in COSTLY and not is_square(node)) or union(costly, node.outs)
        for value in dict.fromkeys(node.ins):
            if is_costly or (read[value] and reduced[value] & 2):
                costly[value] = stored[value] is Precision.F32
            read[value] = 1
    return {v for v, bits in enumerate(reduced) if 0 < bits < 4 and costly[v]}
