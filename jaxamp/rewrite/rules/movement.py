"""Emit movement that is done to a value and its rounding alike, or whose cotangent is not JAX's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.policy.techniques import Technique
from jaxamp.rewrite.registry import RoundedResults, RuleContext, rewrites
from jaxamp.rewrite.rules.collectives import send
from jaxamp.xla.primitives.label_gather import gathers_one_of_each_row, label_gather


@rewrites("rev")
def reverse(context: RuleContext, operand: Any) -> Sequence[Any] | RoundedResults:
    """Reverse the operand, and its rounding if there is one."""
    results = jax_compat.bind(context.eqn, [operand])
    if context.rounding is None:
        return results
    return RoundedResults(results, jax_compat.bind(context.eqn, [context.rounding]))


@rewrites("gather")
def look_up(context: RuleContext, table: Any, indices: Any) -> Sequence[Any] | RoundedResults:
    """Emit a gather; where it takes one number of each row, its cotangent is not a scatter.

    However the table travels, what is added to one row of its gradient adds up in float32.
    """
    eqn = context.eqn
    if context.rewrite.steers(Technique.LABEL_COMPARISONS) and gathers_one_of_each_row(
        table, indices, eqn.params
    ):
        return [label_gather(table, indices, eqn.params)]
    return send(context, [table, indices], Precision.F32)
