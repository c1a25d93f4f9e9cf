"""Plan a program with the compiler hints that its policy asks for."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxamp.found.attention.fuse import fuse_attention
from jaxamp.plan import Plan, planner
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.xla.hints.steer import steer

REGIONS = (fuse_attention,)
"""Per kind of region that is looked for, the function that replaces it in a program."""


def make_plan(closed_jaxpr: ClosedJaxpr, policy: PrecisionPolicy, **words: Any) -> Plan:
    """Plan a program, its regions replaced, with the policy's compiler hints.

    Args:
      closed_jaxpr: the program.
      policy: the policy.
      **words: other arguments of `plan.make_plan`.

    Returns:
      The plan; its `jaxpr` is what is to be emitted.
    """
    found: list[Any] = []
    refused: list[Any] = []
    for replace in REGIONS:
        replaced = replace(closed_jaxpr, policy)
        closed_jaxpr = replaced.jaxpr
        found += replaced.found
        refused += replaced.refused
    plan = planner.make_plan(closed_jaxpr, policy, steer=steer, **words)
    if not found and not refused:
        return plan
    return dataclasses.replace(plan, found=tuple(found), refused=tuple(refused))
