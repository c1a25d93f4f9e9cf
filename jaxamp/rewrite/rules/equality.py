"""Emit comparisons of values of which one was rounded.

See: https://openxla.org/xla/operation_semantics#reduceprecision
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxamp.core import jax_compat
from jaxamp.core.formats import is_narrow
from jaxamp.rewrite.registry import RuleContext, rewrites


@rewrites("eq", "ne")
def compare(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Round all operands before they are compared; XLA never undoes `reduce_precision`."""
    precision = context.decision.accumulation
    if precision is not None and is_narrow(precision):
        info = jnp.finfo(precision.dtype)
        operands = tuple(lax.reduce_precision(x, info.nexp, info.nmant) for x in operands)
    return jax_compat.bind(context.eqn, operands)
