"""Emit dots, convolutions and attentions: narrow operands, f32 accumulation, one rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxamp.core import jax_compat
from jaxamp.core.formats import is_narrow
from jaxamp.kernels.attention import found
from jaxamp.rewrite.primitives.accumulate import accumulate
from jaxamp.rewrite.primitives.quantized_dot import quantized_dot
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
    if decision.scaled is not None:
        (lhs, rhs), axes = operands, eqn.params["dimension_numbers"]
        return [quantized_dot(lhs, rhs, decision.scaled, axes, (output or operand).dtype)]
    narrow, dtype = operand.dtype, (output or operand).dtype
    if dtype == narrow and not context.originals:
        return jax_compat.bind(eqn, operands, preferred_element_type=narrow)
    params = dict(eqn.params)
    return [accumulate(eqn.primitive, operands, params, narrow, dtype, context.originals)]


@rewrites("found_attention")
def forward(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Emit the forward pass."""
    return found.forward(*operands, **context.eqn.params)


@rewrites("found_attention_backward")
def backward(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Emit the backward pass."""
    return found.backward(*operands, **context.eqn.params)
