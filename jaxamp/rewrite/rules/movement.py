"""Emit movement, between devices as well, and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.core import eval_jaxpr

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.rewrite.primitives.narrow_collective import Sending, send_alike, send_narrow
from jaxamp.rewrite.registry import RoundedResults, RuleContext, rewrites


@rewrites("psum", "psum_invariant", "unreduced_psum", "pmax", "pmin")
@rewrites("reduce_scatter", "unreduced_reduce_scatter")
def add_up(context: RuleContext, operand: Any) -> Sequence[Any]:
    """Add up over devices, or compare, in the precision decided."""
    return send_alike(context.eqn, [operand])


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
    """Send the first operand in the precision decided, and its cotangent in another, `back`.

    The cotangent is summed in that, too. After the array there are its indices, if any.
    """
    eqn, decision = context.eqn, context.decision
    narrow, is_float32 = decision.accumulation, decision.operand is not None
    if narrow is None or not is_float32 or operands[0].dtype == narrow.dtype:
        return send_alike(eqn, operands)
    params, widened = tuple(eqn.params.items()), decision.sent is not None
    how = Sending(eqn.primitive, params, narrow.dtype, back.dtype, widened)
    results = send_narrow(operands, how)
    if eqn.primitive.name == "sharding_constraint":  # again: JAX looks for devices in these alone
        results = [*results[:-1], *jax_compat.bind(eqn, results[-1:])]
    return RoundedResults(results[:1], results[1:])


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
    emitter = context.rewrite.emitter
    found = emitter.gather(table, indices, context.eqn.params)
    if found is not None:
        return [found]
    places = emitter.places(indices, table, context.eqn.outvars[0].aval)
    return send(context, [table, places], Precision.F32)


@rewrites("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-max", "scatter-min")
def scatter(context: RuleContext, target: Any, indices: Any, numbers: Any) -> Sequence[Any]:
    """Retype the update function; with none at all, a scatter would be another operation.

    One that puts a number in each row of zeros is emitted as a comparison.
    """
    eqn, operands = context.eqn, [target, indices, numbers]
    if context.decision.plan.hints.label_gather:
        found = context.rewrite.emitter.scatter(target, indices, numbers, eqn.params)
        if found is not None:
            return [found]
    update = eqn.params["update_jaxpr"]
    dtype = target.dtype
    if update is None or update.invars[0].aval.dtype == dtype:
        return jax_compat.bind(eqn, operands)

    def body(*args: Any) -> list[Any]:
        return eval_jaxpr(update, eqn.params["update_consts"], *args)

    avals = [v.aval.update(dtype=dtype, weak_type=False) for v in update.invars]
    retyped = jax_compat.trace_to_jaxpr(body, avals, update.debug_info)
    consts = tuple(retyped.consts)  # parameters are hashed
    return jax_compat.bind(eqn, operands, update_jaxpr=retyped.jaxpr, update_consts=consts)
