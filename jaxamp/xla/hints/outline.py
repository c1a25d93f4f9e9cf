"""Outline the groups of a jaxpr as small programs; equal ones become one object."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision, is_narrow
from jaxamp.jaxprs.hashing import literal_key, params_key
from jaxamp.plan.decision import (
    Decision,
    EquationPlan,
    Fusion,
    FusionCall,
    JaxprPlan,
    OperandRead,
    Reading,
)
from jaxamp.plan.findings import Groupings, Outline, Precisions
from jaxamp.plan.graph.consumers import closure


class Outliner(Outline):
    """Outliner of groups, which reuses the fusions that it has made."""

    def __init__(self) -> None:
        super().__init__()
        self._fusions: dict[Hashable, Fusion] = {}
        self._lines: dict[Hashable, int] = {}

    def steps(
        self, jaxpr: Jaxpr, plan: JaxprPlan, groups: Groupings, recomputed: Mapping[Var, int]
    ) -> tuple[int | FusionCall, ...]:
        """Return what to emit: single equations by their index, and groups as calls."""
        decisions, members = plan.decisions, {i: group for group in groups for i in group}
        order = _order(jaxpr.eqns, members)
        reader = _Reader(jaxpr, plan)
        units = {
            u: _with_recomputed(decisions, members[u], recomputed) if u in members else [u]
            for u in order
        }
        # What single equations read matters where a group makes it.
        made = {v for index in members for v in decisions[index].eqn.outvars}
        read = {
            u: reader.inputs(unit)
            for u, unit in units.items()
            if u in members or any(v in made for v in decisions[u].eqn.invars if isinstance(v, Var))
        }
        wanted: dict[Var, dict[Reading, None]] = {}
        for readings in (*read.values(), reader.results(plan.outputs)):
            for reading in readings:
                wanted.setdefault(reading.var, {})[reading] = None
        return tuple(
            self._call(decisions, units[u], len(members[u]), read[u], wanted) if u in members else u
            for u in order
        )

    def _call(
        self,
        every: Sequence[Decision],
        unit: Sequence[int],
        own: int,
        inputs: tuple[Reading, ...],
        wanted: Mapping[Var, Iterable[Reading]],
    ) -> FusionCall:
        """Return a group: equations that it recomputes, then as many that are its own."""
        decisions = [every[index] for index in unit]
        recomputed = len(decisions) - own
        made = [v for d in decisions[recomputed:] for v in d.eqn.outvars]
        outputs = tuple([reading for var in made for reading in wanted.get(var, ())])
        eqns = [d.eqn for d in decisions]
        names = jax_compat.common_names(eqns)
        key = recomputed, self._key(decisions, inputs, outputs, names)
        fusion = self._fusions.get(key)
        if fusion is None:
            bare = tuple(jax_compat.drop_common_names(eqn, names) for eqn in eqns)
            fusion = self._fusions[key] = Fusion(
                equations=bare,
                decisions=tuple(decisions),
                recomputed=recomputed,
                inputs=inputs,
                outputs=outputs,
            )
        else:
            self.repeated.add(fusion)
        around = jax_compat.keep_common_names(eqns[0], names)
        return FusionCall(
            fusion=fusion, members=tuple(unit), around=around, inputs=inputs, outputs=outputs
        )

    def _key(
        self,
        decisions: Sequence[Decision],
        inputs: Sequence[Reading],
        outputs: Sequence[Reading],
        names: jax_compat.CommonNames,
    ) -> Hashable:
        """Return a key that is equal for groups that are emitted alike."""
        number: dict[Var, int] = {}
        for reading in inputs:
            number.setdefault(reading.var, len(number))
        parts: list[Hashable] = []
        for decision in decisions:
            eqn = decision.eqn
            parts.append(self._line(eqn, decision.plan, names))
            parts += [literal_key(v) if isinstance(v, Literal) else number[v] for v in eqn.invars]
            for var in eqn.outvars:
                number[var] = len(number)
        read, given = (
            tuple([(number[r.var], r.precision, r.is_copy) for r in readings])
            for readings in (inputs, outputs)
        )
        return tuple(parts), read, given

    def _line(self, eqn: JaxprEqn, plan: EquationPlan, names: jax_compat.CommonNames) -> int:
        """Return a number that is equal for equations that differ in their operands only."""
        line = eqn.primitive, params_key(eqn.params), jax_compat.origin(eqn, names), plan
        return self._lines.setdefault(line, len(self._lines))


class _Reader:
    """Finder of the form in which each value of a jaxpr is read."""

    def __init__(self, jaxpr: Jaxpr, plan: JaxprPlan) -> None:
        self.outvars = jaxpr.outvars
        self.decisions = plan.decisions
        self.stored: dict[Any, Precision | None] = dict(zip(jaxpr.invars, plan.inputs, strict=True))
        made = (zip(d.eqn.outvars, d.plan.outputs, strict=True) for d in plan.decisions)
        self.stored.update(itertools.chain.from_iterable(made))
        self._second: dict[EquationPlan, list[tuple[int, OperandRead]]] = {}

    def inputs(self, unit: Sequence[int]) -> tuple[Reading, ...]:
        """Return the values that equations read and do not compute."""
        made = {var for i in unit for var in self.decisions[i].eqn.outvars}
        found: dict[Reading, None] = {}
        for i in unit:
            eqn, plan, *_ = self.decisions[i]
            atoms = eqn.invars
            reads = [*zip(atoms, plan.reads, strict=True)]
            if plan not in self._second:  # plans are few, and shared
                self._second[plan] = [(i, OperandRead(p)) for i, p in plan.second_reads]
            reads += [(atoms[i], read) for i, read in self._second[plan]]
            for var, read in reads:
                if isinstance(var, Var) and var not in made:
                    found[self._reading(var, read)] = None
        return tuple(found)

    def results(self, outputs: Precisions) -> tuple[Reading, ...]:
        """Return the values that the jaxpr returns."""
        results = zip(self.outvars, outputs, strict=True)
        return tuple(self._reading(v, OperandRead(p)) for v, p in results if isinstance(v, Var))

    def _reading(self, var: Var, read: OperandRead) -> Reading:
        if read.copy is not None:
            return Reading(var, read.copy, is_copy=True)
        is_stored = not is_narrow(read.precision) or read.precision is self.stored.get(var)
        return Reading(var, None if read.own_cast or is_stored else read.precision)


def _with_recomputed(
    decisions: Sequence[Decision], group: Sequence[int], again: Mapping[Var, int]
) -> list[int]:
    """Return the equations of a group, after those of earlier groups that it recomputes."""

    def makers(index: int) -> list[int]:
        read = decisions[index].eqn.invars
        return [again[v] for v in read if isinstance(v, Var) and v in again]

    return [*sorted(closure(group, makers) - set(group)), *group]


def _order(eqns: Sequence[JaxprEqn], members: dict[int, Sequence[int]]) -> list[int]:
    """Return units in an order in which each follows all that it reads, the first one first.

    A unit is a single equation, or a group under the index of its first equation. A group that
    would have to run both before and after something is split there.
    """
    while True:
        unit = [members[i][0] if i in members else i for i in range(len(eqns))]
        sorter = TopologicalSorter(_dependences(eqns, unit))
        try:
            sorter.prepare()
        except CycleError as error:
            _, circle = error.args
            for group in [members[u] for u in circle[1:] if u in members]:
                _part(members, group, circle)
            continue
        order, ready = list[int](), list[int]()
        while sorter.is_active():
            for u in sorter.get_ready():
                heapq.heappush(ready, u)
            order.append(heapq.heappop(ready))
            sorter.done(order[-1])
        return order


def _part(members: dict[int, Sequence[int]], group: Sequence[int], circle: Sequence[int]) -> None:
    """Split a group at the first unit that it waits for and that waits for it."""
    between = min((u for u in circle if group[0] < u <= group[-1]), default=group[-1])
    for part in ([i for i in group if i < between], [i for i in group if i >= between]):
        members.update(dict.fromkeys(part, part))


def _dependences(eqns: Sequence[JaxprEqn], unit: Sequence[int]) -> dict[int, set[int]]:
    """Return, per unit, those that it waits for."""
    needed: dict[int, set[int]] = {u: set() for u in unit}
    maker: dict[Any, int] = {}
    effectful: int | None = None
    for here, eqn in zip(unit, eqns, strict=True):
        waits = needed[here]
        for v in eqn.invars:
            if isinstance(v, Var) and v in maker:
                waits.add(maker[v])
        if eqn.effects:  # in the order in which they were written
            if effectful is not None:
                waits.add(effectful)
            effectful = here
        for v in eqn.outvars:
            maker[v] = here
    for here, earlier in needed.items():
        earlier.discard(here)
    return needed
