"""Regions that become something else, and why the others stay as they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax

from jaxamp.core.features import Outcome
from jaxamp.found.attention.fuse import fuse_attention
from jaxamp.found.attention.replacement import KIND
from jaxamp.found.cross_entropy.losses import KIND as LOSS
from jaxamp.found.cross_entropy.worth import MATTERS
from jaxamp.plan import Plan
from jaxamp.policy.policy import PrecisionPolicy

ABSENT = {
    KIND: "no softmax stands between two matrix products of one function",
    LOSS: f"no loss reads logits of {MATTERS // 2**20} MiB or more",
}
"""Per kind of region, what a program has none of where it has no such region."""


def regions_of(plan: Plan) -> tuple[Outcome, ...]:
    """Return the regions of a program: where no kernel is at hand, those that others would run."""
    regions = [*_once(plan.found), *plan.refused]
    if not any(region.kind == KIND for region in regions):
        policy, obstacle = _elsewhere(plan.policy)
        _, found, refused = fuse_attention(plan.jaxpr, policy)
        regions += [*(replace(o, obstacle=obstacle) for o in _once(found)), *refused]
    return tuple(regions)


def _once(found: Sequence[Outcome]) -> Sequence[Outcome]:
    """Leave out backward passes of their own, which are no other regions."""
    return [o for o in found if o.forward] or found


def _elsewhere(policy: PrecisionPolicy) -> tuple[PrecisionPolicy, str]:
    """Return a policy that looks for every kernel, and why the one that was asked for does not."""
    if policy.base.bits != 16:
        word = policy.base.short
        default = PrecisionPolicy.MIXED_BF16.replace(fused_attention=True)
        return default, f"the policy's products are {word}, and the kernels take 16 bits"
    wanted = policy.replace(fused_attention=True)
    if policy.fused_attention is False:
        return wanted, "the policy says fused_attention=False"
    return wanted, f"no kernel runs it on this {jax.default_backend().upper()}"
