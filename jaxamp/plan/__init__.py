"""Deciding: pure analysis from a jaxpr and a policy to a Plan."""

from jaxamp.plan.decision import Decision, Forms, Fusion, JaxprPlan, Plan, Remake, Step
from jaxamp.plan.planner import make_plan

__all__ = ["Decision", "Forms", "Fusion", "JaxprPlan", "Plan", "Remake", "Step", "make_plan"]
