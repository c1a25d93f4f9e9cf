"""Emit logistics whose exponential is evaluated in a narrow format, all else in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision, is_narrow
from jaxamp.rewrite.registry import RuleContext, rewrites


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
