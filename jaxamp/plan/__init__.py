"""Decide, from a jaxpr and a policy alone, how each equation runs."""

from jaxamp.plan.decision import CotangentRounding as CotangentRounding
from jaxamp.plan.decision import Decision as Decision
from jaxamp.plan.decision import EquationPlan as EquationPlan
from jaxamp.plan.decision import Fusion as Fusion
from jaxamp.plan.decision import FusionCall as FusionCall
from jaxamp.plan.decision import Ground as Ground
from jaxamp.plan.decision import Hints as Hints
from jaxamp.plan.decision import JaxprPlan as JaxprPlan
from jaxamp.plan.decision import OperandRead as OperandRead
from jaxamp.plan.decision import Plan as Plan
from jaxamp.plan.decision import Reading as Reading
from jaxamp.plan.decision import RematerializedInput as RematerializedInput
from jaxamp.plan.planner import make_plan as make_plan
from jaxamp.plan.planner import plan_program as plan_program
