"""Emit explicit casts of the user's program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.rewrite.registry import RuleContext, rewrites


@rewrites("convert_element_type")
def convert(context: RuleContext, operand: Any) -> Sequence[Any]:
    """Cast a value, as it is stored, to the dtype that the user asked for.

    A cast from f32 to f32 only drops a weak type: a narrow operand has none and passes.
    """
    if context.decision.outputs[0] not in (None, Precision.F32):
        return [operand]
    return jax_compat.bind(context.eqn, [operand])
