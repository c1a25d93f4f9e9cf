"""Places of regions in the user's program, and what the user has said of them there."""

from __future__ import annotations

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.core.keep_precision import kept_precision
from jaxamp.core.taxonomy import OpKind
from jaxamp.found.levels import Unit
from jaxamp.jaxprs.name_stack import clean_scope, functions_around
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.policy.rules import EquationView, first_match

NARROW = (Precision.BF16, Precision.F16)


def words_of(unit: Unit) -> tuple[str, str]:
    """Return the scope of an equation and its source line."""
    return clean_scope(unit.scope), jax_compat.user_line(unit.eqn.source_info)


def told_otherwise(unit: Unit, policy: PrecisionPolicy, *primitives: str) -> str | None:
    """Return what the user has said of an equation, by such names, if it must stay as it is."""
    scope = unit.scope
    if (kept := kept_precision(scope)) is not None:
        return f"kept in {kept.short} by the program"
    for name in primitives:
        view = EquationView(
            primitive=name,
            kind=OpKind.COMPUTE,
            scope=clean_scope(scope),
            functions=lambda: functions_around(scope, unit.eqn),
        )
        index = first_match(policy.rules, view) if policy.rules else None
        if index is not None and policy.rules[index].precision not in NARROW:
            return f"rule: {policy.rules[index]}"
    return None
