"""Plan a program with the compiler hints that its policy asks for."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxamp.attention.fuse import fuse_attention
from jaxamp.plan import Plan, planner
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.xla.hints.steer import steer


def make_plan(closed_jaxpr: ClosedJaxpr, policy: PrecisionPolicy, **words: Any) -> Plan:
    """Plan a program, its attentions as single equations, with the policy's compiler hints.

    Args:
      closed_jaxpr: the program.
      policy: the policy.
      **words: other arguments of `plan.make_plan`.

    Returns:
      The plan; its `jaxpr` is what is to be emitted.
    """
    fused = fuse_attention(closed_jaxpr, policy)
    plan = planner.make_plan(fused.jaxpr, policy, steer=steer, **words)
    if not fused.attentions and not fused.refused:
        return plan
    return dataclasses.replace(plan, attentions=fused.attentions, refused_attentions=fused.refused)
