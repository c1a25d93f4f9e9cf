"""Dots and convolutions: narrow operands, f32 accumulation, one rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jaxamp import _compat
from jaxamp.formats import Precision
from jaxamp.plan import Decision
from jaxamp.rewrite.registry import Context, rewrites


@rewrites("dot_general", "conv_general_dilated", "ragged_dot_general")
def contract(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """Emits the result in the precision that it is stored in, rounded once by the hardware.

    A narrow result makes the cotangent narrow, so the backward dots are narrow as well. An f32
    result of narrow operands needs a derivative rule of its own for that.
    """
    operand, output = decision.operands[0], decision.outputs[0]
    if operand is None or operand.bits >= Precision.F32.bits:
        return _compat.bind(eqn, operands)
    if output is not Precision.F32:
        return _compat.bind(eqn, operands, preferred_element_type=operand.dtype)
    return [_accumulated(eqn, operand, operands)]


def _accumulated(eqn: JaxprEqn, narrow: Precision, operands: Sequence[Any]) -> jax.Array:
    """A contraction that gives its f32 accumulator, and whose derivatives are narrow ones.

    Left to JAX, the transpose would multiply an f32 cotangent with a narrow operand, which no
    matrix unit does. Here tangents and cotangents are rounded to the narrow format first.
    """
    floats, others = operands[:2], operands[2:]  # a ragged dot also takes group sizes

    def bilinear(lhs: Any, rhs: Any, dtype: np.dtype) -> jax.Array:
        return _compat.bind(eqn, [lhs, rhs, *others], preferred_element_type=dtype)[0]

    @jax.custom_jvp
    def accumulated(lhs: Any, rhs: Any) -> jax.Array:
        return bilinear(lhs, rhs, np.dtype(np.float32))

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        out = accumulated(*primals)
        terms = []
        for index, tangent in enumerate(tangents):
            if not _compat.is_symbolic_zero(tangent):
                pair = [*primals]
                pair[index] = tangent
                terms.append(bilinear(*pair, narrow.dtype).astype(np.float32))
        return out, sum(terms[1:], terms[0]) if terms else out * 0

    accumulated.defjvp(rule, symbolic_zeros=True)
    return accumulated(*floats)
