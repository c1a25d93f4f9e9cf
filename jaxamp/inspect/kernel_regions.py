"""Regions that become something else, and why the others stay as they are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax

from jaxamp.core.features import Outcome, Refused
from jaxamp.found.attention.fuse import fuse_attention
from jaxamp.found.attention.replacement import KIND
from jaxamp.found.cross_entropy.losses import KIND as LOSS
from jaxamp.found.cross_entropy.worth import MATTERS
from jaxamp.plan import Plan
from jaxamp.policy.policy import PrecisionPolicy

ABSENT = {
    KIND: "no softmax stands between two matrix products",
    LOSS: f"no loss reads logits of {MATTERS // 2**20} MiB or more",
}
"""Per kind of region, what a program has none of where it has no such region."""


class Region(NamedTuple):
    """Operations of a program that one kernel can run, or a loop over parts of them.

    Attributes:
      kind: what they are, such as ``"attention"``.
      scope: where they are, as the user wrote it.
      source: ``file:line (function)`` of the user's code.
      obstacle: why they stay as they are written; empty if they do not.
      saved: bytes that are not stored; 0 where that is not known.
      slower: the predicted time of the program, against that without.
    """

    kind: str
    scope: str
    source: str
    obstacle: str = ""
    saved: int = 0
    slower: float = 1.0


def regions_of(plan: Plan) -> tuple[Region, ...]:
    """Return the regions of a program: where no kernel is at hand, those that others would run."""
    regions = [*_regions(plan.found, plan.refused)]
    if not any(region.kind == KIND for region in regions):
        policy, obstacle = _elsewhere(plan.policy)
        _, found, refused = fuse_attention(plan.jaxpr, policy)
        regions += _regions(found, refused, obstacle)
    return tuple(regions)


def _regions(
    found: Iterable[Outcome], refused: Iterable[Refused], obstacle: str = ""
) -> Iterator[Region]:
    forward = [o for o in found if o.forward] or found  # a backward pass of its own is no other
    for o in forward:
        yield Region(o.kind, o.scope, o.source, obstacle, o.saved, o.slower)
    yield from (Region(r.kind, r.scope, r.source, r.reason) for r in refused)


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
