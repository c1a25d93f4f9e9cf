"""Deciding: pure analysis from a jaxpr and a policy to a Plan."""

from jaxamp.plan.decision import (
    Decision,
    Echo,
    Forms,
    Fusion,
    Ground,
    JaxprPlan,
    Plan,
    Remake,
    Scaled,
    Step,
)
from jaxamp.plan.planner import make_plan

__all__ = [
    "Decision",
    "Echo",
    "Forms",
    "Fusion",
    "Ground",
    "JaxprPlan",
    "Plan",
    "Remake",
    "Scaled",
    "Step",
    "make_plan",
]
