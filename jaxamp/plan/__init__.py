"""Decide, from a jaxpr and a policy alone, how each equation runs."""

from jaxamp.plan.decision import (
    CotangentRounding,
    Decision,
    EquationPlan,
    Fusion,
    FusionCall,
    Ground,
    Hints,
    JaxprPlan,
    OperandRead,
    Plan,
    Reading,
    RematerializedInput,
)
from jaxamp.plan.planner import make_plan, plan_program

__all__ = [
    "CotangentRounding",
    "Decision",
    "EquationPlan",
    "Fusion",
    "FusionCall",
    "Ground",
    "Hints",
    "JaxprPlan",
    "OperandRead",
    "Plan",
    "Reading",
    "RematerializedInput",
    "make_plan",
    "plan_program",
]
