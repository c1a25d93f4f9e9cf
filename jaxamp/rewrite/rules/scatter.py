"""Emit scatters, whose update function is a jaxpr typed like their operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.core import eval_jaxpr

from jaxamp.core import jax_compat
from jaxamp.rewrite.registry import RuleContext, rewrites
from jaxamp.xla.primitives.label_gather import scatter_by_comparison, scatters_one_to_each_row


@rewrites("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-max", "scatter-min")
def scatter(context: RuleContext, target: Any, indices: Any, numbers: Any) -> Sequence[Any]:
    """Retype the update function; with none at all, a scatter would be another operation.

    One that puts a number in each row of zeros is emitted as a comparison.
    """
    eqn, operands = context.eqn, [target, indices, numbers]
    if context.decision.plan.hints.label_gather and scatters_one_to_each_row(
        target, indices, eqn.params
    ):
        (axis,) = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
        return [scatter_by_comparison(numbers, indices, target.shape, axis)]
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
