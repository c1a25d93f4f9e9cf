"""A jaxpr with its calls opened: a flat list of units over numbered values.

Loops, branches, checkpoints and mapped functions are units, as are functions with derivative rules
of their own; the equations inside of those are seen, and stay where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jaxamp.jaxprs.interpret import walk
from jaxamp.jaxprs.known_arrays import Atom, KnownArrays
from jaxamp.jaxprs.name_stack import joined_scope
from jaxamp.jaxprs.nested import RULED, called, is_region, nested

_OPENED = frozenset({"jit", "pjit", "closed_call", "call"})
# JAX's own, whose rule is the derivative, see jax/_src/nn/functions.py.
_SOFTMAX = "custom_jvp_call", "_softmax"
_LARGEST = 1 << 26  # elements of a known array: the causal mask of 8,192 words

Given = Mapping[int, tuple[KnownArrays, Atom]]
"""Per input of a jaxpr that is known, the arrays known around it and which one of these it is."""


@dataclass(slots=True, eq=False)
class Unit:
    """An equation, or a call with what it holds."""

    eqn: JaxprEqn
    ins: tuple[Atom, ...]
    outs: tuple[Atom, ...]  # of an opened call the values inside
    inside: list[Unit] | None = None  # units of an opened call
    is_whole: bool = False  # whether a call can only be emitted whole: it has a derivative rule
    around: tuple[JaxprEqn, ...] = ()  # the calls that hold it
    outer: str = ""  # the scope of the jaxpr that is opened

    @property
    def is_call(self) -> bool:
        """True for a call whose equations may be emitted alone."""
        return self.inside is not None and not self.is_whole

    @property
    def scope(self) -> str:
        """Its name stack, after those of the calls that hold it."""
        return functools.reduce(joined_scope, (*self.around, self.eqn), self.outer)


@dataclass(eq=False)
class Level:
    """A jaxpr, opened."""

    closed: ClosedJaxpr  # of two that are joined the first
    avals: list[Any] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)  # captured arrays by value
    units: list[Unit] = field(default_factory=list)
    exits: list[Atom] = field(default_factory=list)
    is_final: bool = False  # a rule's: no rule in it matters, and captured arrays are literals

    @functools.cached_property
    def equations(self) -> list[Unit]:
        """All equations, in order, those inside of calls too."""
        return [*_opened(self.units, whole=False)]

    @functools.cached_property
    def makers(self) -> dict[int, Unit]:
        """The equation that makes each value."""
        return {value: unit for unit in self.equations for value in numbers(unit.outs)}

    @functools.cached_property
    def _readers(self) -> dict[int, set[int]]:
        """Per value the equations that read it, by their places."""
        found: dict[int, set[int]] = {}
        for place, unit in enumerate(self.equations):
            for value in numbers(unit.ins):
                found.setdefault(value, set()).add(place)
        return found

    def made_of(self, values: Iterable[int]) -> list[Unit]:
        """Return the equations that need any of some values, in order."""
        places, pending = set[int](), [*values]
        while pending:
            new = self._readers.get(pending.pop(), set()) - places
            places |= new
            pending += (a for place in new for a in numbers(self.equations[place].outs))
        return [self.equations[place] for place in sorted(places)]

    @functools.cached_property
    def moving(self) -> set[int]:
        """The real values that have a derivative along real inputs of the level."""
        avals = enumerate(self.avals)
        real = {a for a, aval in avals if jnp.issubdtype(getattr(aval, "dtype", int), np.floating)}
        found = real.intersection(self.entries)
        for unit in self.equations:
            is_stopped = unit.eqn.primitive.name == "stop_gradient"
            if not is_stopped and not found.isdisjoint(numbers(unit.ins)):
                found.update(real.intersection(numbers(unit.outs)))
        return found

    def atomic(self) -> Iterator[Unit]:
        """Yield what is emitted or left out as one: equations, and calls that stay whole."""
        yield from _opened(self.units, whole=True)


def open_level(closed: ClosedJaxpr, scope: str, *, is_final: bool = False) -> Level:
    """Return a jaxpr of some scope, opened."""
    level = Level(closed, is_final=is_final)
    level.entries = [new_value(level, v.aval) for v in closed.jaxpr.invars]
    level.units, level.exits = open_into(level, closed, level.entries, scope)
    return level


def known_in(level: Level, given: Given) -> KnownArrays:
    """Return the known arrays of a level."""
    known = KnownArrays(level.avals, _LARGEST)
    for entry, (around, atom) in given.items():
        known.enter(entry, around.thin_shape(atom), lambda _, at=(around, atom): at[0].thin(at[1]))
    for value, const in level.constants.items():
        if not isinstance(const, Tracer) and hasattr(const, "dtype"):
            known.enter(value, tuple(const.shape), lambda _, const=const: const)
    for unit in level.equations:
        known.follow(unit.eqn, unit.ins, unit.outs)
    return known


def new_value(level: Level, aval: Any) -> int:
    """Return the number of another value of a level."""
    level.avals.append(aval)
    return len(level.avals) - 1


def open_into(
    level: Level,
    closed: ClosedJaxpr,
    entries: Sequence[Atom],
    scope: str,
    around: tuple[JaxprEqn, ...] = (),
) -> tuple[list[Unit], list[Atom]]:
    """Return the units and results of a jaxpr, opened into a level whose values it reads.

    `entries` are the values that it reads, and `around` the calls that hold its equations.
    """
    units: list[Unit] = []
    consts: list[Atom] = []
    for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        if level.is_final:
            consts.append(Literal(const, var.aval))
        else:
            consts.append(value := new_value(level, var.aval))
            level.constants[value] = const

    def visit(eqn: JaxprEqn, operands: Sequence[Atom]) -> tuple[Atom, ...]:
        ins = tuple(operands)
        if _is_opened(eqn, is_final=level.is_final):
            inside, outs = open_into(level, called(eqn), ins, scope, (*around, eqn))
            is_whole = eqn.primitive.name in RULED and not level.is_final
            units.append(Unit(eqn, ins, tuple(outs), inside, is_whole, around, scope))
        else:
            outs = [new_value(level, v.aval) for v in eqn.outvars]
            units.append(Unit(eqn, ins, tuple(outs), around=around, outer=scope))
        return units[-1].outs

    return units, walk(closed.jaxpr, consts, entries, visit, lambda literal: literal)


def _is_opened(eqn: JaxprEqn, *, is_final: bool) -> bool:
    name = eqn.primitive.name
    if name not in _OPENED | RULED or is_region(eqn) or eqn.effects or len(nested(eqn)) != 1:
        return False
    rule = name, called(eqn).jaxpr.debug_info.func_name
    if name in RULED and not is_final and rule != _SOFTMAX:
        return False  # its derivative need not be that of what it computes
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return all(type(s).__name__ == "UnspecifiedValue" for s in shardings)


def _opened(units: Sequence[Unit], *, whole: bool) -> Iterator[Unit]:
    """Yield units with the calls among them opened, or left if they can only be emitted `whole`."""
    for unit in units:
        if unit.inside is None or (whole and unit.is_whole):
            yield unit
        else:
            yield from _opened(unit.inside, whole=whole)


def leaves(unit: Unit) -> list[Unit]:
    """Return what is emitted or left out as one inside of a call."""
    return [*_opened(unit.inside or (), whole=True)]


def numbers(atoms: Iterable[Atom]) -> list[int]:
    """Return the values among what is read or made."""
    return [a for a in atoms if isinstance(a, int)]


def made(unit: Unit) -> set[int]:
    """Return all values that a unit makes, those inside of a call too."""
    return {*numbers(unit.outs)}.union(*map(made, unit.inside or ()))


def live_from(level: Level, wanted: set[int], cut: frozenset[int]) -> set[Unit]:
    """Return the units that some values need or that have an effect, but not for those cut."""
    wanted = set(wanted)
    live: set[Unit] = set()
    for unit in reversed(list(level.atomic())):
        if unit.eqn.effects or not wanted.isdisjoint({*numbers(unit.outs)} - cut):
            live.add(unit)
            wanted.update(numbers(unit.ins))
    return live
