"""Doing: emit the program that a Plan describes."""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxamp.core import jax_compat
from jaxamp.plan import Plan
from jaxamp.rewrite import jet as taylor
from jaxamp.rewrite import rules
from jaxamp.rewrite.environment import cast
from jaxamp.rewrite.interpreter import interpret_whole
from jaxamp.rewrite.recorder import Recorder
from jaxamp.rewrite.registry import Context, rewrites

__all__ = ["record", "rewrites", "rules", "run_plan", "taylor"]


def run_plan(
    closed_jaxpr: ClosedJaxpr, plan: Plan, *args: Any, recorder: Recorder | None = None
) -> list[Any]:
    """Emits a program under the current trace, or runs it where there is none.

    Args:
      closed_jaxpr: the program.
      plan: what was decided for it.
      *args: its flat arguments, of the types of ``closed_jaxpr.in_avals``.
      recorder: what counts the casts, if they are to be counted.

    Returns:
      Its flat results, of the types of ``closed_jaxpr.out_avals``; floats in the policy's output
      dtype where it has one.

    Raises:
      RewriteError: a primitive does not accept what was decided for it.
    """
    context = Context(plan.policy, plan.steer, plan.repeated, recorder)
    results = interpret_whole(context, closed_jaxpr, plan.body, args)
    wanted = plan.policy.output_dtype
    return [cast(r, wanted if p else None) for r, p in zip(results, plan.body.outputs, strict=True)]


def record(plan: Plan) -> Recorder:
    """Emits the program of a plan, which nobody runs, and counts its casts."""
    recorder, closed = Recorder(), plan.jaxpr

    def program(*args: Any) -> list[Any]:
        return run_plan(closed, plan, *args, recorder=recorder)

    emitted = jax_compat.trace_to_jaxpr(program, closed.in_avals, closed.jaxpr.debug_info)
    pairs = zip(plan.body.outputs, emitted.out_avals, strict=True)
    recast = sum(p is not None and p.dtype != aval.dtype for p, aval in pairs)
    recorder.results[plan.body].inserted += recast
    return recorder
