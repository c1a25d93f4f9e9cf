"""Emit sums of two arrays, whose cotangent may be rounded once for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxamp.core import jax_compat
from jaxamp.rewrite.registry import RuleContext, rewrites
from jaxamp.xla.primitives.rounded_cotangent import sum_with_rounded_cotangent


@rewrites("add", "sub")
def add(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Add or subtract; round the cotangent where that is decided."""
    rounding = context.decision.plan.hints.cotangent_rounding
    if rounding is None:
        return jax_compat.bind(context.eqn, operands)
    return [sum_with_rounded_cotangent(context.eqn, operands, rounding)]
