"""From a jaxpr and a policy to a Plan that XLA compiles as it was meant."""

from __future__ import annotations

from functools import partial

from jaxamp.plan import planner
from jaxamp.xla.steer import steer

make_plan = partial(planner.make_plan, steer=steer)
"""As `plan.make_plan`, with the steering that the policy asks for."""
