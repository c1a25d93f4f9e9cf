"""Emit collectives that move arrays between devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxamp.core import jax_compat
from jaxamp.rewrite.primitives.narrow_collective import travel
from jaxamp.rewrite.registry import RoundedResults, RuleContext, rewrites


@rewrites("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "ppermute")
@rewrites("pbroadcast", "pvary")
def move(context: RuleContext, *operands: Any) -> Sequence[Any] | RoundedResults:
    """Send in the precision decided; a cotangent comes back in the policy's ``allreduce``.

    A result that is stored wide comes with its rounding: the array as it has arrived.
    """
    eqn, decision = context.eqn, context.decision
    forth = decision.accumulation
    is_ours = decision.operand is not None
    if forth is None or not is_ours or operands[0].dtype == forth.dtype:
        return jax_compat.bind(eqn, operands)
    back = context.rewrite.policy.allreduce
    params, widened = dict(eqn.params), decision.sent is not None
    results = travel(eqn.primitive, operands[0], params, forth.dtype, back.dtype, widened=widened)
    return RoundedResults(results[:1], results[1:])
