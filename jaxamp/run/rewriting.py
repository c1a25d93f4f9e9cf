"""Plan and rewrite a traced program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxamp.rewrite import run_plan
from jaxamp.run.idle_policy import warn_of_idle_parts
from jaxamp.run.settings import Settings
from jaxamp.xla.steered_plan import make_plan


def rewrite(jaxpr: ClosedJaxpr, arrays: Sequence[Any], settings: Settings, name: str) -> list[Any]:
    """Emit a program under its plan, which is freed before the garbage collector visits it."""
    plan = make_plan(jaxpr, settings.policy, strict=settings.strict)
    warn_of_idle_parts(plan, name)
    return run_plan(plan.jaxpr, plan, *arrays)
