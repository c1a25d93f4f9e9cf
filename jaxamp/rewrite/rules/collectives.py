"""Emit collectives that move arrays between devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.rewrite.primitives.narrow_collective import send_narrow
from jaxamp.rewrite.registry import RoundedResults, RuleContext, rewrites


@rewrites("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "ppermute")
@rewrites("pbroadcast", "pvary", "sharding_constraint", "reshard")
def move(context: RuleContext, *operands: Any) -> Sequence[Any] | RoundedResults:
    """Send in the precision decided; the cotangent is sent in the policy's ``allreduce``.

    A result that is stored wide comes with its rounding: the array as it was received.
    """
    return send(context, operands, context.rewrite.policy.allreduce)


def send(
    context: RuleContext, operands: Sequence[Any], back: Precision
) -> Sequence[Any] | RoundedResults:
    """Send the first operand in the precision decided, and its cotangent in another.

    Args:
      context: of an equation that moves its first operand.
      operands: the array, and its indices if there are any.
      back: the precision in which the cotangent is sent and summed.
    """
    eqn, decision = context.eqn, context.decision
    narrow, is_float32 = decision.accumulation, decision.operand is not None
    if narrow is None or not is_float32 or operands[0].dtype == narrow.dtype:
        return jax_compat.bind(eqn, operands)
    params, widened = dict(eqn.params), decision.sent is not None
    results = send_narrow(
        eqn.primitive, operands, params, narrow.dtype, back.dtype, widened=widened
    )
    return RoundedResults(results[:1], results[1:])
