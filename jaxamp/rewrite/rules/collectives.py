"""Emit collectives that move arrays between devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.rewrite.primitives.narrow_collective import travel
from jaxamp.rewrite.registry import RoundedResults, RuleContext, rewrites


@rewrites("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "ppermute")
@rewrites("pbroadcast", "pvary", "sharding_constraint", "reshard")
def move(context: RuleContext, *operands: Any) -> Sequence[Any] | RoundedResults:
    """Send in the precision decided; a cotangent comes back in the policy's ``allreduce``.

    A result that is stored wide comes with its rounding: the array as it has arrived.
    """
    return send(context, operands, context.rewrite.policy.allreduce)


def send(
    context: RuleContext, operands: Sequence[Any], back: Precision
) -> Sequence[Any] | RoundedResults:
    """Move the first operand in the precision decided, and its cotangent in another.

    Args:
      context: of an equation that moves its first operand.
      operands: that, and what says where it goes.
      back: the precision in which a cotangent is added up.
    """
    eqn, decision = context.eqn, context.decision
    forth = decision.accumulation
    is_ours = decision.operand is not None
    if forth is None or not is_ours or operands[0].dtype == forth.dtype:
        return jax_compat.bind(eqn, operands)
    params, widened = dict(eqn.params), decision.sent is not None
    results = travel(eqn.primitive, operands, params, forth.dtype, back.dtype, widened=widened)
    return RoundedResults(results[:1], results[1:])
