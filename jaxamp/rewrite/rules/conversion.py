"""Explicit casts of the user's program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.plan import Decision
from jaxamp.rewrite.registry import Context, rewrites


@rewrites("convert_element_type")
def convert(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """Casts what is stored to what was asked for.

    A cast from f32 to f32 only drops a weak type: a narrow operand has none and passes.
    """
    if decision.outputs[0] not in (None, Precision.F32):
        return operands
    return jax_compat.bind(eqn, operands)
