"""Collectives that move arrays between devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.plan import Decision
from jaxamp.rewrite.primitives.narrow_collective import travel
from jaxamp.rewrite.registry import Context, rewrites


@rewrites("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "ppermute")
@rewrites("pbroadcast", "pvary")
def move(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """Sends in the precision decided; what comes back in a backward pass is the policy's choice.

    What is stored wide is followed by what has arrived, which is its rounding.
    """
    forth = decision.accumulation
    is_ours = decision.operand is not None
    if forth is None or not is_ours or operands[0].dtype == forth.dtype:
        return jax_compat.bind(eqn, operands)
    back = context.policy.allreduce
    params, widened = dict(eqn.params), decision.sent is not None
    return travel(eqn.primitive, operands[0], params, forth.dtype, back.dtype, widened=widened)
