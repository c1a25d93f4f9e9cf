"""Count the casts that a plan puts into a program, and those that it does without."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params

from jaxamp.core import jax_compat
from jaxamp.plan import Plan
from jaxamp.rewrite import run_plan


class Casts(NamedTuple):
    """Casts of a program, each as often as it runs; a compiler fuses and merges many of them.

    Attributes:
      inserted: conversions between float formats that the rewritten program has more.
      shared: reads that find the cast of an earlier reader.
      cancelled: reads that find a value stored in the narrow format that they want, where a cast at
        every operation would have widened and narrowed it.
    """

    inserted: int
    shared: int
    cancelled: int


def count_inserted(plan: Plan) -> int:
    """Return how many conversions the program of a plan has more than the original one."""
    closed = plan.jaxpr
    emitted = jax_compat.trace_to_jaxpr(
        lambda *args: run_plan(closed, plan, *args), closed.in_avals, closed.jaxpr.debug_info
    )
    return _conversions(emitted.jaxpr) - _conversions(closed.jaxpr)


def _conversions(jaxpr: Jaxpr) -> int:
    """Count conversions between float formats; those in a loop as often as they run."""
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type":
            aval: Any = eqn.invars[0].aval
            given, made = aval.dtype, eqn.params["new_dtype"]
            are_floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (given, made))
            count += are_floats and given != made
        runs = eqn.params.get("length", 1)
        count += runs * sum(map(_conversions, jaxprs_in_params(eqn.params)))
    return count
