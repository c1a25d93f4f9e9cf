"""Choose hints for XLA, beside a program's precisions."""

from __future__ import annotations

from dataclasses import replace

from jaxamp.plan.findings import Findings, Steering
from jaxamp.xla.hints.constant_rematerialization import find_constants
from jaxamp.xla.hints.joint_recomputation import join_recomputations
from jaxamp.xla.hints.lone_checkpoints import find_lone_checkpoints
from jaxamp.xla.hints.outline import Outliner
from jaxamp.xla.hints.recomputation import Recomputation
from jaxamp.xla.hints.roundings import (
    find_barriered_roundings,
    find_cotangent_roundings,
    find_reversed_weights,
    find_unbarriered_reads,
)
from jaxamp.xla.hints.techniques import WORKS_ON, Technique


def steer(findings: Findings) -> Steering:
    """Choose the steering of a program, by the techniques that its policy has on."""
    chosen, graph = findings.policy.xla, findings.flow.graph
    techniques = {t for t in chosen if t not in WORKS_ON or WORKS_ON[t] in chosen}
    uses_barriers = Technique.ROUNDING_BARRIERS in techniques
    barriered = find_barriered_roundings(findings) if uses_barriers else frozenset[int]()
    unbarriers = Technique.UNBARRIERED_READS in techniques
    reverses = Technique.REVERSED_WEIGHTS in techniques
    keeps_barriers = Technique.RECOMPUTATION_BARRIERS not in techniques
    lone = () if keeps_barriers else find_lone_checkpoints(graph, findings.frame)
    steering = Steering(
        uses_barriers=uses_barriers,
        barriers=barriered,
        call_barriers=barriered,
        unbarriered=find_unbarriered_reads(findings, barriered) if unbarriers else frozenset(),
        reversed_weights=find_reversed_weights(findings) if reverses else {},
        relu_signs=findings.relu_signs if Technique.RELU_RESIDUALS in techniques else frozenset(),
        lone=frozenset(lone),
    )
    if findings.groups is None:
        return steering
    if Technique.FUSED_GROUPS in techniques:
        recomputation = Recomputation(findings, techniques)
        steering = replace(
            steering,
            call_barriers=barriered - recomputation.saved_by_rules,
            outline=Outliner(),
            units=join_recomputations(findings.groups, findings.readings, recomputation.recomputed),
            residuals=recomputation.saved,
            recomputed=recomputation.recomputed,
        )
    if Technique.COTANGENT_ROUNDINGS in techniques:
        roundings = find_cotangent_roundings(findings)
        if not unbarriers:  # then nothing reads a rounding before its barrier
            roundings = {v: r._replace(held=(0, 1)) for v, r in roundings.items()}
        steering = replace(steering, cotangent_roundings=roundings)
    if Technique.LABEL_COMPARISONS in techniques:
        scatters = graph.named.get("scatter-add", ())
        spread = {node for node in scatters if graph.constants.get(node.ins[0]) == 0}
        steering = replace(steering, label_gathers=findings.groups.label_gathers | spread)
    if Technique.CONSTANT_REMATERIALIZATION in techniques:
        rematerialized = find_constants(graph, findings.frame)
        steering = replace(steering, rematerialized=rematerialized)
    return steering
