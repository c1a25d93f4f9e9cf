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
    Scaled,
)
from jaxamp.plan.planner import make_plan
from jaxamp.plan.precision.scaled import Units

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
    "Scaled",
    "Units",
    "make_plan",
]
