"""Dots and convolutions: narrow operands, f32 accumulation, one rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.core.formats import is_narrow
from jaxamp.plan import Decision
from jaxamp.rewrite.primitives.accumulate import accumulate
from jaxamp.rewrite.primitives.quantized_dot import quantized_dot
from jaxamp.rewrite.registry import Context, parted, rewrites


@rewrites("dot_general", "conv_general_dilated", "ragged_dot_general")
def contract(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """Emits the result in the precision that it is stored in, rounded once by the hardware.

    A narrow result makes the cotangent narrow, so the backward dots are narrow as well. Where the
    result, or what an operand is the rounding of, is float32, a primitive of ours sees to that.
    """
    operand, output = decision.operands[0], decision.outputs[0]
    if not is_narrow(operand):
        return jax_compat.bind(eqn, operands)
    if decision.scaled is not None:
        (lhs, rhs), axes = operands, eqn.params["dimension_numbers"]
        return [quantized_dot(lhs, rhs, decision.scaled, axes, (output or operand).dtype)]
    narrow, dtype = operand.dtype, (output or operand).dtype
    operands, origins = parted(eqn, operands)
    if dtype == narrow and not origins:
        return jax_compat.bind(eqn, operands, preferred_element_type=narrow)
    meant = dict(zip([index for index, _ in decision.also], origins, strict=False))
    return [accumulate(eqn.primitive, operands, dict(eqn.params), narrow, dtype, meant)]
