"""Plan and rewrite a traced program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxamp.core.keep_precision import kept_around
from jaxamp.plan import plan_program
from jaxamp.rewrite import run_plan
from jaxamp.run.idle_policy import warn_of_idle_parts
from jaxamp.run.settings import Settings, is_trial


def rewrite(jaxpr: ClosedJaxpr, arrays: Sequence[Any], settings: Settings, name: str) -> list[Any]:
    """Emit a program under its plan, which is freed before the garbage collector visits it."""
    plan = plan_program(jaxpr, settings.policy, strict=settings.strict)
    if kept_around() is None and not is_trial():
        warn_of_idle_parts(plan, name)
    return run_plan(plan.jaxpr, plan, *arrays)
