"""Places of regions in the user's program, and what the user has said of them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.core.keep_precision import kept_precision
from jaxamp.core.taxonomy import OpKind
from jaxamp.found.levels import Unit
from jaxamp.jaxprs.name_stack import clean_scope, functions_around, joined_scope
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.policy.rules import EquationView, first_match

NARROW = (Precision.BF16, Precision.F16)


@dataclass(slots=True)
class Place:
    """Place of an equation."""

    unit: Unit
    scope: str

    @property
    def words(self) -> tuple[str, str]:
        """Its scope and its source line."""
        return clean_scope(self.scope), jax_compat.user_line(self.unit.eqn.source_info)

    def told_otherwise(self, policy: PrecisionPolicy, *primitives: str) -> str | None:
        """Return what the user has said of it, by such names, if it must stay as it is."""
        if (kept := kept_precision(self.scope)) is not None:
            return f"kept in {kept.short} by the program"
        for name in primitives:
            view = EquationView(
                primitive=name,
                kind=OpKind.COMPUTE,
                scope=clean_scope(self.scope),
                functions=lambda: functions_around(self.scope, self.unit.eqn),
            )
            index = first_match(policy.rules, view) if policy.rules else None
            if index is not None and policy.rules[index].precision not in NARROW:
                return f"rule: {policy.rules[index]}"
        return None


class Scopes:
    """Scopes of units, of which few are asked for."""

    def __init__(self, units: Sequence[Unit] = (), scope: str = "") -> None:
        self._around: dict[Unit, Unit | str] = {}
        self.enter(units, scope)

    def enter(self, units: Sequence[Unit], around: Unit | str) -> None:
        """Enter units, and those inside of them, within a scope or a call that has one."""
        for unit in units:
            self._around[unit] = around
            self.enter(unit.inside or (), unit)

    def __getitem__(self, unit: Unit) -> str:
        around = self._around[unit]
        return joined_scope(around if isinstance(around, str) else self[around], unit.eqn)

    def place(self, unit: Unit) -> Place:
        """Return the place of a unit."""
        return Place(unit, self[unit])
