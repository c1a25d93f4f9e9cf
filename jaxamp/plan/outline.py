"""Takes the groups of a jaxpr out into small programs; equal ones become one object."""

from __future__ import annotations

import heapq
from collections.abc import Container, Hashable, Iterator, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from jaxamp import _compat
from jaxamp.formats import Precision, is_narrow
from jaxamp.plan.decision import Decision, Form, Forms, Fusion, Step

Precisions = Sequence[Precision | None]
Reads = list[list[tuple[Var, Form]]]  # per equation; the last are those of the jaxpr's results


class Outliner:
    """Makes steps of groups, and remembers the fusions that it has made."""

    def __init__(self) -> None:
        self._fusions: dict[Hashable, Fusion] = {}

    def steps(
        self,
        jaxpr: Jaxpr,
        decisions: Sequence[Decision],
        identities: Sequence[Hashable],
        inputs: Precisions,
        outputs: Precisions,
        groups: Sequence[Sequence[int]],
        again: Container[Var],
    ) -> tuple[int | Step, ...]:
        """What to emit, in order: single equations by their index, and groups.

        Args:
          jaxpr: the program.
          decisions: one for each of its equations.
          identities: what tells each decision from others.
          inputs: precisions in which its inputs arrive.
          outputs: precisions in which its results leave.
          groups: indices of equations that are emitted as one unit.
          again: variables that a later group computes again rather than reads.
        """
        if not groups:
            return tuple(range(len(jaxpr.eqns)))
        members = {index: group for group in groups for index in group}
        order = _order(jaxpr, members)
        reads = _reads(jaxpr, decisions, inputs, outputs)
        maker = {v: i for i in members for v in jaxpr.eqns[i].outvars if v in again}
        units = {u: _with_makers(members[u], reads, maker) if u in members else [u] for u in order}
        taken = {u: _taken(jaxpr, unit, reads) for u, unit in units.items()}
        wanted: dict[Var, dict[Form, None]] = {}
        for forms in (*taken.values(), reads[-1]):
            for var, form in forms:
                wanted.setdefault(var, {})[form] = None
        return tuple(
            self._step(jaxpr, decisions, identities, units[u], members[u], taken[u], wanted)
            if u in members
            else u
            for u in order
        )

    def _step(
        self,
        jaxpr: Jaxpr,
        decisions: Sequence[Decision],
        identities: Sequence[Hashable],
        unit: Sequence[int],
        group: Sequence[int],
        takes: Forms,
        wanted: dict[Var, dict[Form, None]],
    ) -> Step:
        eqns = tuple(jaxpr.eqns[i] for i in unit)
        own = [v for i in group for v in jaxpr.eqns[i].outvars]
        gives = tuple((var, form) for var in own for form in wanted.get(var, ()))
        makers = len(unit) - len(group)
        scope = _compat.common_scope(eqns)
        key = makers, _key(eqns, [identities[i] for i in unit], takes, gives, scope)
        if key not in self._fusions:
            chosen = tuple(decisions[i] for i in unit)
            bare = tuple(_compat.without_scope(eqn, scope) for eqn in eqns)
            self._fusions[key] = Fusion(
                equations=bare, decisions=chosen, makers=makers, takes=takes, gives=gives
            )
        around = _compat.within_scope(eqns[0], scope)
        return Step(fusion=self._fusions[key], around=around, takes=takes, gives=gives)


def _with_makers(group: Sequence[int], reads: Reads, maker: dict[Var, int]) -> list[int]:
    """The equations of a group, after those of earlier groups that it computes again."""
    own, pending = set(group), list(group)
    makers: set[int] = set()
    while pending:
        for var, _ in reads[pending.pop()]:
            index = maker.get(var)
            if index is not None and index not in own and index not in makers:
                makers.add(index)
                pending.append(index)
    return [*sorted(makers), *group]


def _taken(jaxpr: Jaxpr, unit: Sequence[int], reads: Reads) -> Forms:
    """What equations read that they do not make."""
    made = {var for i in unit for var in jaxpr.eqns[i].outvars}
    return tuple(dict.fromkeys(read for i in unit for read in reads[i] if read[0] not in made))


def _reads(
    jaxpr: Jaxpr, decisions: Sequence[Decision], inputs: Precisions, outputs: Precisions
) -> Reads:
    """What each equation reads, in which form."""
    stored: dict[Any, Precision | None] = dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn, decision in zip(jaxpr.eqns, decisions, strict=True):
        stored.update(zip(eqn.outvars, decision.outputs, strict=True))

    def form(var: Var, precision: Precision | None, fresh: bool, copy: Precision | None) -> Form:
        if copy is not None:
            return Form(copy, held=True)
        is_cast = is_narrow(precision) and not fresh
        return Form(precision if is_cast and precision is not stored.get(var) else None)

    found: Reads = []
    for eqn, d in zip(jaxpr.eqns, decisions, strict=True):
        columns = zip(eqn.invars, d.operands, d.fresh, d.copies, strict=True)
        found.append([(v, form(v, p, f, c)) for v, p, f, c in columns if isinstance(v, Var)])
    results = zip(jaxpr.outvars, outputs, strict=True)
    found.append([(v, form(v, p, False, None)) for v, p in results if isinstance(v, Var)])
    return found


def _order(jaxpr: Jaxpr, members: dict[int, Sequence[int]]) -> list[int]:
    """First equations of groups, and single ones, so that all that one reads comes before it.

    A group that would have to run both before and after something is parted there.
    """
    while True:
        unit = [members[i][0] if i in members else i for i in range(len(jaxpr.eqns))]
        before, after = _dependences(jaxpr, unit)
        ready = [u for u in dict.fromkeys(unit) if not before[u]]
        heapq.heapify(ready)
        order = []
        while ready:
            order.append(heapq.heappop(ready))
            for later in after[order[-1]]:
                before[later].discard(order[-1])
                if not before[later]:
                    heapq.heappush(ready, later)
        if len(order) == len(before):
            return order
        for circle in _circles(after):
            for first in circle:
                if len(members.get(first, ())) > 1:
                    _part(members, members[first], circle)


def _circles(after: dict[int, list[int]]) -> Iterator[list[int]]:
    """Sets of units that wait for each other, each in order."""
    units = sorted(after)
    place = {u: n for n, u in enumerate(units)}
    edges = [(place[u], place[v]) for u in units for v in after[u]]
    rows, columns = zip(*edges, strict=True)
    graph = coo_array(([True] * len(edges), (rows, columns)), shape=(len(units),) * 2)
    _, labels = connected_components(graph, connection="strong")
    circles: dict[int, list[int]] = {}
    for unit, label in zip(units, labels.tolist(), strict=True):
        circles.setdefault(label, []).append(unit)
    yield from (circle for circle in circles.values() if len(circle) > 1)


def _part(members: dict[int, Sequence[int]], group: Sequence[int], circle: Sequence[int]) -> None:
    """Parts a group at the first thing that it waits for and that waits for it."""
    between = min((u for u in circle if group[0] < u <= group[-1]), default=group[-1])
    for part in ([i for i in group if i < between], [i for i in group if i >= between]):
        members.update(dict.fromkeys(part, part))


def _dependences(
    jaxpr: Jaxpr, unit: Sequence[int]
) -> tuple[dict[int, set[int]], dict[int, list[int]]]:
    """Per unit, the units that have to come before, and those that wait for it."""
    before: dict[int, set[int]] = {u: set() for u in unit}
    after: dict[int, list[int]] = {u: [] for u in unit}
    maker: dict[Any, int] = {}
    effectful: int | None = None
    for index, eqn in enumerate(jaxpr.eqns):
        here = unit[index]
        needed = {maker[v] for v in eqn.invars if isinstance(v, Var) and v in maker}
        if eqn.effects:  # in the order in which they were written
            needed |= set() if effectful is None else {effectful}
            effectful = here
        for earlier in needed - {here} - before[here]:
            before[here].add(earlier)
            after[earlier].append(here)
        maker.update(dict.fromkeys(eqn.outvars, here))
    return before, after


def _key(
    eqns: Sequence[JaxprEqn],
    identities: Sequence[Hashable],
    takes: Forms,
    gives: Forms,
    scope: int,
) -> Hashable:
    """What two groups that are emitted alike have in common."""
    number: dict[Var, int] = {}
    for var, _ in takes:
        number.setdefault(var, len(number))
    lines = []
    for eqn, identity in zip(eqns, identities, strict=True):
        operands = tuple(_literal(v) if isinstance(v, Literal) else number[v] for v in eqn.invars)
        for var in eqn.outvars:
            number[var] = len(number)
        params = tuple((name, _hashable(value)) for name, value in eqn.params.items())
        lines.append((eqn.primitive, operands, params, _compat.origin(eqn, scope), identity))
    interface = [tuple((number[var], form) for var, form in forms) for forms in (takes, gives)]
    return tuple(lines), *interface


def _literal(literal: Literal) -> Hashable:
    value = _compat.literal_value(literal)
    return literal.aval, value.tobytes() if hasattr(value, "tobytes") else value


def _hashable(value: Any) -> Hashable:
    """A parameter, or its identity: the fusion that is kept keeps it alive."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
