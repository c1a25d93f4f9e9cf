"""Equality of values of which one was rounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.core.formats import is_narrow
from jaxamp.plan import Decision
from jaxamp.rewrite.registry import Context, rewrites


@rewrites("eq", "ne")
def compare(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """Rounds all operands before they are compared; XLA never undoes `reduce_precision`."""
    precision = decision.accumulation
    if precision is not None and is_narrow(precision):
        info = jnp.finfo(precision.dtype)
        operands = [lax.reduce_precision(x, info.nexp, info.nmant) for x in operands]
    return jax_compat.bind(eqn, operands)
