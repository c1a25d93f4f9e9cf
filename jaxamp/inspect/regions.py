"""Regions that one kernel may run: those that do, and why the others stay as they are written."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jaxamp.attention.fuse import fuse_attention
from jaxamp.plan import Plan
from jaxamp.policy.policy import PrecisionPolicy

ATTENTION = "attention"


class Region(NamedTuple):
    """Operations of a program that one kernel can run.

    Attributes:
      what: ``"attention"``.
      scope: where it is, as the user wrote it.
      source: ``file:line (function)`` of the user's code.
      obstacle: why it stays as it is written; empty if one kernel runs it.
    """

    what: str
    scope: str
    source: str
    obstacle: str = ""


def regions_of(plan: Plan) -> tuple[Region, ...]:
    """Return the regions of a program: where there is no kernel, those that others would run."""
    found, refused = plan.attentions, plan.refused_attentions
    obstacle = ""
    if not found and not refused:
        policy, obstacle = _elsewhere(plan.policy)
        _, found, refused = fuse_attention(plan.jaxpr, policy)
    forward = [a for a in found if a.forward] or found
    return (
        *(Region(ATTENTION, a.scope, a.source, obstacle) for a in forward),
        *(Region(ATTENTION, r.scope, r.source, r.reason) for r in refused),
    )


def _elsewhere(policy: PrecisionPolicy) -> tuple[PrecisionPolicy, str]:
    """Return a policy that looks for every kernel, and why the one that was asked for does not."""
    if policy.base.bits != 16:
        word = policy.base.short
        default = PrecisionPolicy.MIXED_BF16.replace(fused_attention=True)
        return default, f"the policy's products are {word}, and the kernels take 16 bits"
    wanted = policy.replace(fused_attention=True)
    if policy.fused_attention is False:
        return wanted, "the policy says fused_attention=False"
    if policy.is_scaled and policy.scaling.batched and policy.scaling.all_operands:
        return wanted, "the policy quantizes its products, which no kernel does"
    return wanted, f"no kernel runs it on this {jax.default_backend().upper()}"
