"""Replace regions of a program, level by level."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxamp.core import jax_compat
from jaxamp.core.features import Outcome, Replaced
from jaxamp.found.emit_level import Changes, emit_level
from jaxamp.found.levels import Given, Level, Unit, known_in, open_level
from jaxamp.found.pairs import Together, join, pairs_of
from jaxamp.found.region import Kind
from jaxamp.jaxprs.hashing import share_rules
from jaxamp.jaxprs.known_arrays import KnownArrays
from jaxamp.jaxprs.nested import Wiring, loop, nested, wiring

_ENTERED = (Wiring.CALL, Wiring.BRANCHES, Wiring.SCAN, Wiring.WHILE)


def replace_regions(closed: ClosedJaxpr, kind: Kind) -> Replaced:
    """Return a float32 program with its regions of one kind replaced."""
    search = _Search(kind)
    changed = search.level(closed, {}, "")
    if changed is not closed:
        changed = share_rules(changed)
    refused = tuple(o for o in search.outcomes if o.obstacle)
    return Replaced(changed, tuple(o for o in search.outcomes if not o.obstacle), refused)


class _Search:
    """Replacement of regions, level by level."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.outcomes: list[Outcome] = []  # regions found, and refused
        self._words: dict[Jaxpr, frozenset[str]] = {}  # alive: no other has its identity

    def _may_hold(self, closed: ClosedJaxpr) -> bool:
        return self.kind.parts <= self._words_in(closed.jaxpr)

    def _words_in(self, jaxpr: Jaxpr) -> frozenset[str]:
        """Return the words of equations in a jaxpr; each jaxpr is walked once."""
        if jaxpr not in self._words:
            inside = (self._words_in(body.jaxpr) for eqn in jaxpr.eqns for body in nested(eqn))
            self._words[jaxpr] = frozenset(map(self.kind.word, jaxpr.eqns)).union(*inside)
        return self._words[jaxpr]

    def level(self, closed: ClosedJaxpr, given: Given, scope: str) -> ClosedJaxpr:
        """Return a jaxpr, and those within, with its regions replaced."""
        if not self._may_hold(closed):
            return closed
        level = open_level(closed, scope)
        changes = self.changes(level, given)
        return emit_level(level, changes) if changes.any else closed

    def changes(self, level: Level, given: Given) -> Changes:
        """Return what changes in a level."""
        known = known_in(level, given)
        bodies, bindings = self._inside(level, known)
        regions, refused = self.kind.find(level, known)
        self.outcomes += [*(region.outcome for region in regions), *refused]
        return Changes(regions, bodies, bindings)

    def _inside(
        self, level: Level, known: KnownArrays
    ) -> tuple[dict[Unit, list[ClosedJaxpr]], dict[Unit, Together]]:
        """Return the jaxprs of loops, branches and the like that change, and pairs of loops."""
        bodies: dict[Unit, list[ClosedJaxpr]] = {}
        bindings: dict[Unit, Together] = {}
        outcomes: dict[Unit, list[Outcome]] = {}
        for unit in level.atomic():
            if unit.is_whole or wiring(unit.eqn) not in _ENTERED:
                continue
            if unit.eqn.primitive.name == "custom_vjp_call":
                continue
            inside = nested(unit.eqn)
            if not any(map(self._may_hold, inside)):
                continue
            given = _given(unit, known)
            change = functools.partial(self._bodies, inside, given, unit.scope)
            changed = jax_compat.within(unit.eqn, change)
            outcomes[unit] = self._taken()
            if any(new is not old for new, old in zip(changed, inside, strict=True)):
                bodies[unit] = changed
        is_paired = self.kind.crosses and any(o.obstacle for o in chain(*outcomes.values()))
        for pair in pairs_of(level) if is_paired else ():
            both = pair.first, pair.second
            apart = [o for unit in both for o in outcomes.get(unit, ())]
            if not any(o.obstacle for o in apart):
                continue
            joined = join(pair, known)
            changes = self.changes(joined.level, joined.given)
            across = self._taken()
            if changes.bindings and pair.first.eqn.primitive.name == "shard_map":
                continue  # what loops of both hand over would need specs
            if _backward(across) > _backward(apart):
                together = Together(joined, changes)
                for unit in both:
                    bodies.pop(unit, None)
                    bindings[unit] = together
                outcomes |= {pair.first: [], pair.second: across}
        self.outcomes += chain(*outcomes.values())
        return bodies, bindings

    def _bodies(self, inside: Sequence[ClosedJaxpr], given: Given, scope: str) -> list[ClosedJaxpr]:
        return [self.level(body, given, scope) for body in inside]

    def _taken(self) -> list[Outcome]:
        """Return what has been found and refused since, and forget it."""
        taken, self.outcomes = self.outcomes, []
        return taken


def _backward(outcomes: Sequence[Outcome]) -> int:
    """Return how many backward passes are found."""
    return sum(outcome.backward and not outcome.obstacle for outcome in outcomes)


def _given(unit: Unit, known: KnownArrays) -> Given:
    """Return the inputs of a unit's jaxprs that are known numbers."""
    match wiring(unit.eqn):
        case Wiring.CALL:
            operands = list(enumerate(unit.ins))
        case Wiring.SCAN:
            operands = list(enumerate(unit.ins))[: loop(unit.eqn).invariants]
        case Wiring.BRANCHES:
            operands = list(enumerate(unit.ins[1:]))
        case _:
            operands = []
    if unit.eqn.primitive.name == "shard_map":  # a part of an array is on each device
        pairs = zip(unit.eqn.invars, nested(unit.eqn)[0].jaxpr.invars, strict=True)
        shapes: Any = [(whole.aval, part.aval) for whole, part in pairs]
        whole = {i for i, (a, b) in enumerate(shapes) if a.shape == b.shape}
        operands = [(i, a) for i, a in operands if i in whole]
    return {i: (known, a) for i, a in operands if a in known}
