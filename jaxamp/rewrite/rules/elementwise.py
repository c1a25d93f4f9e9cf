"""Emit elementwise equations: sums, casts, comparisons of rounded values, and logistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision, is_narrow
from jaxamp.rewrite.registry import RuleContext, rewrites


@rewrites("add", "sub", "mul")
def add(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Add, subtract or multiply; round the cotangent where that is decided."""
    rounding = context.decision.plan.hints.cotangent_rounding
    if rounding is None:
        return jax_compat.bind(context.eqn, operands)
    return [context.rewrite.emitter.add(context.eqn, operands, rounding)]


@rewrites("convert_element_type")
def convert(context: RuleContext, operand: Any) -> Sequence[Any]:
    """Cast a value, as it is stored, to the dtype that the user asked for.

    A cast from f32 to f32 only drops a weak type: a narrow operand has none and passes.
    """
    if context.decision.outputs[0] not in (None, Precision.F32):
        return [operand]
    return jax_compat.bind(context.eqn, [operand])


@rewrites("reduce_precision")
def rounded(context: RuleContext, operand: Any) -> Sequence[Any]:
    """Round to the format that a value is stored in, or to a coarser one of the program."""
    info = jnp.finfo(operand.dtype)
    bits = {"exponent_bits": info.nexp, "mantissa_bits": info.nmant}
    kept = {name: min(number, context.eqn.params[name]) for name, number in bits.items()}
    return jax_compat.bind(context.eqn, [operand], **kept)


@rewrites("eq", "ne")
def compare(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Round all operands before they are compared; XLA never undoes `reduce_precision`."""
    precision = context.decision.accumulation
    if precision is not None and is_narrow(precision):
        info = jnp.finfo(precision.dtype)
        operands = tuple(lax.reduce_precision(x, info.nexp, info.nmant) for x in operands)
    return jax_compat.bind(context.eqn, operands)


@rewrites("logistic")
def logistic(context: RuleContext, x: Any) -> Sequence[Any]:
    """Emit a logistic, with its exponential in the operand's format if the plan says so."""
    decision = context.decision
    if is_narrow(decision.operand) and decision.accumulation is Precision.F32:
        return [_of_narrow_exponential(x)]
    return jax_compat.bind(context.eqn, [x])


@jax.custom_jvp
def _of_narrow_exponential(x: Any) -> jax.Array:
    return 1 / (1 + jnp.exp(-x).astype(np.float32))


@_of_narrow_exponential.defjvp
def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    """Differentiate as JAX does a logistic: an infinite exponential must not become NaN."""
    y = _of_narrow_exponential(*primals)
    return y, tangents[0].astype(np.float32) * (y * (1 - y))
