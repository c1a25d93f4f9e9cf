"""Choose hints for XLA, beside a program's precisions."""

from __future__ import annotations

from collections.abc import Iterator

from jaxamp.plan.dataflow.label_gathers import is_label_scatter
from jaxamp.plan.findings import Findings
from jaxamp.plan.graph.graph import Graph, Node
from jaxamp.plan.steering import Steering
from jaxamp.xla.constant_rematerialization import find_constants
from jaxamp.xla.cotangent_roundings import find_cotangent_roundings
from jaxamp.xla.held_roundings import find_held_roundings, find_unbarriered_sums
from jaxamp.xla.recomputation import Recomputation


def steer(findings: Findings) -> Steering:
    """Choose the steering of a program."""
    held = find_held_roundings(findings)
    unbarriered = find_unbarriered_sums(findings, held)
    if findings.groups is None:
        return Steering(
            holds=True,
            held=held,
            held_by_calls=held,
            unbarriered=unbarriered,
            signs=findings.relu_signs,
        )
    recomputation = Recomputation(findings)
    return Steering(
        holds=True,
        held=held,
        held_by_calls=held - recomputation.saved_by_rules,
        unbarriered=unbarriered,
        cotangents=find_cotangent_roundings(findings),
        label_gathers=findings.groups.label_gathers | set(_spreading(findings.graph)),
        outlines=True,
        saved=recomputation.saved,
        recomputed=recomputation.recomputed,
        signs=findings.relu_signs,
        constants=find_constants(findings.graph, findings.frame),
    )


def _spreading(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.named.get("scatter-add", ()) if is_label_scatter(graph, node))
