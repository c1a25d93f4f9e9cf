"""Emit the program that a plan describes."""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxamp.core import jax_compat
from jaxamp.plan import Plan
from jaxamp.rewrite import rules
from jaxamp.rewrite.environment import cast
from jaxamp.rewrite.interpreter import interpret_whole
from jaxamp.rewrite.recorder import Recorder
from jaxamp.rewrite.registry import RewriteContext, rewrites

__all__ = ["record", "rewrites", "rules", "run_plan"]


def run_plan(
    closed_jaxpr: ClosedJaxpr, plan: Plan, *args: Any, recorder: Recorder | None = None
) -> list[Any]:
    """Emit a program under the current trace, or run it where there is none.

    Args:
      closed_jaxpr: the program.
      plan: its plan.
      *args: its flat arguments, of the types of ``closed_jaxpr.in_avals``.
      recorder: counter of the casts, if they are to be counted.

    Returns:
      Its flat results, of the types of ``closed_jaxpr.out_avals``; floats in the policy's output
      dtype where it has one.

    Raises:
      RewriteError: a primitive does not accept the dtypes decided for it.
    """
    context = RewriteContext(plan.policy, plan.repeated, recorder)
    results = interpret_whole(context, closed_jaxpr, plan.body, args)
    wanted = plan.policy.output_dtype
    return [cast(r, wanted if p else None) for r, p in zip(results, plan.body.outputs, strict=True)]


def record(plan: Plan) -> Recorder:
    """Trace the program of a plan without running it, and count its casts."""
    recorder, closed = Recorder(), plan.jaxpr

    def program(*args: Any) -> list[Any]:
        return run_plan(closed, plan, *args, recorder=recorder)

    emitted = jax_compat.trace_to_jaxpr(program, closed.in_avals, closed.jaxpr.debug_info)
    pairs = zip(plan.body.outputs, emitted.out_avals, strict=True)
    recast = sum(p is not None and p.dtype != aval.dtype for p, aval in pairs)
    recorder.results[plan.body].inserted += recast
    return recorder
