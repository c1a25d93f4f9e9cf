"""Movement that is done to a value and to its rounding, or that has a cotangent of our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.plan import Decision
from jaxamp.policy.techniques import Technique
from jaxamp.rewrite.registry import Context, parted, rewrites
from jaxamp.xla.label_gather import is_pick, pick


@rewrites("rev")
def reverse(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """Reverses what it is given, and the rounding if there is one."""
    operands, rounded = parted(eqn, operands)
    values = [*operands, *rounded]
    return [result for value in values for result in jax_compat.bind(eqn, [value])]


@rewrites("gather")
def look_up(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """Looks up; of one number of each row the cotangent needs no scattering."""
    table, indices = operands
    if context.steers(Technique.LABEL_COMPARISONS) and is_pick(table, indices, eqn.params):
        return [pick(table, indices, eqn.params)]
    return jax_compat.bind(eqn, operands)
