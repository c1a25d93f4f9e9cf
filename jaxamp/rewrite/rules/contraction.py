"""Emit dots and convolutions: narrow operands, f32 accumulation, one rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxamp.core import jax_compat
from jaxamp.core.formats import is_narrow
from jaxamp.rewrite.primitives.accumulate import accumulate
from jaxamp.rewrite.registry import RuleContext, rewrites


@rewrites("dot_general", "conv_general_dilated", "ragged_dot_general")
def contract(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Emit the result in the precision that it is stored in, rounded once by the hardware.

    A narrow result makes the cotangent narrow, so the backward dots are narrow as well. Where the
    result, or the original of an operand, is float32, the primitive `accumulate` does so.
    """
    eqn, decision = context.eqn, context.decision
    operand, output = decision.operands[0], decision.outputs[0]
    if not is_narrow(operand):
        return jax_compat.bind(eqn, operands)
    narrow, dtype = operand.dtype, (output or operand).dtype
    if dtype == narrow and not context.originals:
        return jax_compat.bind(eqn, operands, preferred_element_type=narrow)
    own = {i for i in context.originals if decision.plan.reads[i].own_cast}
    rounded = {i: original for i, original in context.originals.items() if i not in own}
    read = [context.originals[i] if i in own else x for i, x in enumerate(operands)]
    return [accumulate(eqn.primitive, read, dict(eqn.params), narrow, dtype, rounded)]
