"""Deciding: pure analysis from a jaxpr and a policy to a Plan."""

from jaxamp.plan.decision import Decision, JaxprPlan, Plan
from jaxamp.plan.planner import make_plan

__all__ = ["Decision", "JaxprPlan", "Plan", "make_plan"]
