"""Emit a level with its attentions as single equations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jax.extend.core import ClosedJaxpr, Literal

from jaxamp.attention.levels import Atom, Level, Unit, leaves, live_from, numbers
from jaxamp.attention.match import Held
from jaxamp.attention.replacement import Emission, Placed, Replacement, needed
from jaxamp.attention.scores import Scores
from jaxamp.attention.values import Factor
from jaxamp.core import jax_compat
from jaxamp.jaxprs.interpret import bind_nested


class Binding(Protocol):
    """Emission of units that change together, one after the other."""

    def emit(self, emitter: Emitter, unit: Unit) -> Sequence[Any]:
        """Emit one of the units; of its results those that nobody reads are ``None``."""
        ...


@dataclass(slots=True)
class Changes:
    """Changes of a level.

    Attributes:
      scores: the values of the level.
      replacements: attentions that become single equations.
      bodies: other jaxprs of loops, branches and the like.
      bindings: units that are emitted by something else.
    """

    scores: Scores
    replacements: Sequence[Replacement]
    bodies: Mapping[Unit, list[ClosedJaxpr]]
    bindings: Mapping[Unit, Binding]

    @property
    def any(self) -> bool:
        """Return whether anything changes."""
        return bool(self.replacements or self.bodies or self.bindings)


class Emitter:
    """Emission of one level, or of a part of it.

    Attributes:
      env: the values that have been emitted.
      handed: what the first unit of a binding leaves to the next.
      emissions: those of its attentions.
      live: values that units which stay or attentions read, or the level returns.
      units: units that stay.
      held: per value that holds a result of an attention: that, the result, and how it is held.
    """

    def __init__(self, level: Level, changes: Changes) -> None:
        self.level, self.changes, self.scores = level, changes, changes.scores
        self.env: dict[int, Any] = dict(level.constants)
        self.handed: dict[Binding, Any] = {}
        replacements = changes.replacements
        cut = frozenset().union(*(r.found.cut for r in replacements))
        self._needed: set[int] = set().union(*(needed(self.scores, r) for r in replacements))
        exits = {*numbers(level.exits)}
        self.units = live_from(level, (exits | self._needed) - cut, cut)
        self._before = live_from(level, exits, frozenset())
        self.live = (exits | self._needed).union(*(numbers(u.ins) for u in self.units))
        self.held: dict[int, tuple[Replacement, str, Held]] = {
            h.value: (r, n, h)
            for r in replacements
            for n, hs in r.found.results.items()
            for h in hs
        }
        self.emissions = {
            r: Emission(r, self.array, bias_grad=self._needs_bias_grad(r)) for r in replacements
        }

    def _needs_bias_grad(self, replacement: Replacement) -> bool:
        results = replacement.found.results.items()
        return any(h.value in self.live for n, hs in results if n.startswith("dbias") for h in hs)

    def read(self, atom: Atom) -> Any:
        """Return a value that has been emitted."""
        return jax_compat.literal_value(atom) if isinstance(atom, Literal) else self.env[atom]

    def array(self, factor: Factor) -> Placed:
        """Return the array of a tensor, and its axes."""
        base = self.scores.algebra.bases[factor.base]
        if base.kind == "leaf":
            return self.env[base.data], factor.places
        value, form = self.scores.homes[factor.base]
        ((own, number),) = [form.single]  # type: ignore[misc]
        inside = dict(zip(own.places, factor.places, strict=True))
        parts = {a: inside[(a,)] for a in form.axes}
        places = tuple(tuple(b for a in p for b in parts[a]) for p in form.places)
        array = self.env[value]
        return (array if number == 1 else array * (1 / number)), places

    def emit(self, args: Sequence[Any]) -> list[Any]:
        """Emit the level."""
        self.env.update(zip(self.level.entries, args, strict=True))
        self.run(self.level.units)
        return [self.read(a) for a in self.level.exits]

    def run(self, units: Sequence[Unit]) -> None:
        """Emit units, and results of attentions where the program has them."""
        for unit in units:
            if unit.inside is not None and not unit.is_whole:
                self._call(unit)
                continue
            if unit in self.units:
                with jax_compat.emitting(unit.eqn):
                    self.bind(unit)
            for value in numbers(unit.outs):
                if value in self.held and value in self.live:
                    with jax_compat.emitting(unit.eqn):
                        self.env[value] = self.holding(value)

    def holding(self, value: int) -> Any:
        """Return a value of the program that holds a result of an attention."""
        replacement, name, held = self.held[value]
        result = self.emissions[replacement].value(held, name)
        return result.astype(self.level.avals[value].dtype)

    def _call(self, unit: Unit) -> None:
        if self.is_opened(unit):
            with jax_compat.emitting(unit.eqn):
                self.run(unit.inside or ())
        elif self.is_bound(unit):
            with jax_compat.emitting(unit.eqn):
                self.bind(unit)

    def is_bound(self, unit: Unit) -> bool:
        """Return whether a call has anything that stays."""
        return any(
            u in self.units or any(a in self.held and a in self.live for a in numbers(u.outs))
            for u in leaves(unit)
        )

    def is_opened(self, unit: Unit) -> bool:
        """Return whether anything changes in a call, so that its equations are emitted alone."""
        outs = numbers(unit.outs)
        return self.is_bound(unit) and any(
            (u in self.units) != (u in self._before)
            or u in self.changes.bodies
            or u in self.changes.bindings
            or any(a in self.held or (a in self._needed and a not in outs) for a in numbers(u.outs))
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
