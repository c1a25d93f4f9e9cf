"""From a traced program to its results in mixed precision: plan, then rewrite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxamp.rewrite import run_plan
from jaxamp.run.idle import warn_of_idle_parts
from jaxamp.run.settings import Settings
from jaxamp.xla.steered_plan import make_plan


def rewrite(jaxpr: ClosedJaxpr, arrays: Sequence[Any], settings: Settings, name: str) -> list[Any]:
    """Rewrite a program in place; its plan is gone before the collector could walk it."""
    plan = make_plan(jaxpr, settings.policy, strict=settings.strict)
    warn_of_idle_parts(plan, name)
    return run_plan(plan.jaxpr, plan, *arrays)
