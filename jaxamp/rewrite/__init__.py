"""Emit the program that a plan describes."""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxamp.plan import Plan
from jaxamp.rewrite import rules
from jaxamp.rewrite.environment import cast
from jaxamp.rewrite.interpreter import interpret_whole
from jaxamp.rewrite.registry import RewriteContext, rewrites

__all__ = ["rewrites", "rules", "run_plan"]


def run_plan(closed_jaxpr: ClosedJaxpr, plan: Plan, *args: Any) -> list[Any]:
    """Emit a program under the current trace, or run it where there is none.

    Arguments and results are flat, of the types of ``closed_jaxpr``; floats of the results are in
    the policy's output dtype where it has one.

    Raises:
      RewriteError: a primitive does not accept the dtypes decided for it.
    """
    context = RewriteContext(plan.policy, plan.repeated)
    results = interpret_whole(context, closed_jaxpr, plan.body, args)
    wanted = plan.policy.output_dtype
    return [cast(r, wanted if p else None) for r, p in zip(results, plan.body.outputs, strict=True)]
