"""Emit a level with its regions replaced."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

from jaxamp.core import jax_compat
from jaxamp.found.levels import Atom, Level, Unit, leaves, live_from, numbers
from jaxamp.found.region import Region
from jaxamp.jaxprs.interpret import bind_nested


@dataclass(slots=True)
class Changes:
    """Changes of a level."""

    regions: Sequence[Region]
    bodies: Mapping[Unit, list[ClosedJaxpr]]  # other jaxprs of loops, branches and the like
    bindings: Mapping[Unit, Any]  # units that change together: the `pairs.Together` of each

    @property
    def any(self) -> bool:
        """Return whether anything changes."""
        return bool(self.regions or self.bodies or self.bindings)


def staying(level: Level, regions: Sequence[Any]) -> tuple[set[Unit], set[int]]:
    """Return the units that stay beside regions, and what these and the level's callers read."""
    cut = frozenset[int]().union(*(region.made for region in regions))
    read = {*numbers(level.exits)}.union(*(region.needed for region in regions))
    return live_from(level, read - cut, cut), read


class Emitter:
    """Emission of one level, or of a part of it."""

    def __init__(self, level: Level, changes: Changes) -> None:
        self.level, self.changes = level, changes
        self.env: dict[int, Any] = dict(level.constants)  # the values that have been emitted
        self.handed: dict[Any, Any] = {}  # what the first unit of a binding leaves to the next
        self.units, self._read = staying(level, changes.regions)
        self._before, _ = staying(level, ())
        # Values that units which stay or regions read, or the level returns.
        self.live = self._read.union(*(numbers(u.ins) for u in self.units))
        self.held = {value: r for r in changes.regions for value in r.made}
        self.emissions = {r: r.emission(self.read, self.live) for r in changes.regions}

    def read(self, atom: Atom) -> Any:
        """Return a value that has been emitted."""
        if isinstance(atom, Literal):
            return jax_compat.literal_value(atom)
        if atom not in self.env:
            self._pull(atom)
        return self.env[atom]

    def _pull(self, value: int) -> None:
        """Emit what makes a value before its turn, as a region reads it before its first result."""
        unit = self._makers[value]
        with jax_compat.without_names(), jax_compat.emitting(unit.eqn, unit.around):
            if value in self.held:
                self.env[value] = self.holding(value)
            else:
                self.bind(unit)

    @functools.cached_property
    def _makers(self) -> dict[int, Unit]:
        """Units that make values: equations, those inside of calls by themselves."""
        units = reversed([*self.level.atomic()])  # calls return what they are given, too
        return {value: unit for unit in units for value in numbers(unit.outs)}

    def emit(self, args: Sequence[Any]) -> list[Any]:
        """Emit the level."""
        self.env.update(zip(self.level.entries, args, strict=True))
        self.run(self.level.units)
        return [self.read(a) for a in self.level.exits]

    def run(self, units: Sequence[Unit]) -> None:
        """Emit units, and what regions make where the program has it."""
        for unit in units:
            if not self._is_done(unit) and self.stays(unit):
                with jax_compat.emitting(unit.eqn):
                    if self.is_opened(unit):
                        self.run(unit.inside or ())
                    else:
                        self.bind(unit)
            for value in numbers(unit.outs):
                if value in self.held and value in self.live and value not in self.env:
                    with jax_compat.emitting(unit.eqn):
                        self.env[value] = self.holding(value)

    def holding(self, value: int) -> Any:
        """Return a value of the program that a region makes."""
        result = self.emissions[self.held[value]].value(value)
        return result.astype(self.level.avals[value].dtype)

    def _is_done(self, unit: Unit) -> bool:
        """Return whether a unit has been emitted before its turn."""
        outs = numbers(unit.outs)
        return bool(outs) and all(value in self.env for value in outs)

    def stays(self, unit: Unit) -> bool:
        """Return whether an equation stays, or anything in a call."""
        if not unit.is_call:
            return unit in self.units
        return any(
            u in self.units or any(a in self.held and a in self.live for a in numbers(u.outs))
            for u in leaves(unit)
        )

    def is_opened(self, unit: Unit) -> bool:
        """Return whether anything changes in a call that stays: its equations are emitted alone."""
        outs = numbers(unit.outs)
        return unit.is_call and any(
            (u in self.units) != (u in self._before)
            or u in self.changes.bodies
            or u in self.changes.bindings
            or any(a in self.held or (a in self._read and a not in outs) for a in numbers(u.outs))
            for u in leaves(unit)
        )

    def bind(self, unit: Unit) -> None:
        """Emit an equation, or a call as a whole."""
        if unit in self.changes.bindings:
            results = self.changes.bindings[unit].emit(self, unit)
        elif unit in self.changes.bodies:
            operands = [self.read(a) for a in unit.ins]
            results = bind_nested(unit.eqn, operands, self.changes.bodies[unit])
        else:
            results = jax_compat.bind(unit.eqn, [self.read(a) for a in unit.ins])
        for atom, result in zip(unit.outs, results, strict=True):
            if isinstance(atom, int) and result is not None:
                self.env.setdefault(atom, result)


def emit_level(level: Level, changes: Changes) -> ClosedJaxpr:
    """Return the jaxpr of a level with its changes."""

    def emitted(*args: Any) -> list[Any]:
        return Emitter(level, changes).emit(args)

    jaxpr = level.closed.jaxpr
    return jax_compat.trace_to_jaxpr(emitted, level.closed.in_avals, jaxpr.debug_info)
