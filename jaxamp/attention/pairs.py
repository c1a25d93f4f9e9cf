"""Two loops of which the second reads what the first hands over, as JAX differentiates a scan.

The first stacks residuals, the second reads them at the same index, whichever way it goes. So both
bodies are one program, iteration by iteration: an attention whose forward pass is in one and whose
backward pass is in the other is found there like any other. What is emitted are two loops again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import ClosedJaxpr

from jaxamp.attention.known_numbers import Given, KnownNumbers, Outer
from jaxamp.attention.levels import Atom, Level, Unit, made, new_value, open_into
from jaxamp.attention.replace import Changes, Emitter
from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import OpKind, lookup
from jaxamp.jaxprs.nested import Wiring, loop, nested, wiring


class Pair(NamedTuple):
    """Two scans.

    Attributes:
      first: the one that comes first.
      second: one that reads arrays which the first has stacked.
      links: per operand of the second that is only sliced, the result of the first that it is.
      kept: results of the first that others read.
    """

    first: Unit
    second: Unit
    links: dict[int, int]
    kept: frozenset[int]


def pairs_of(level: Level) -> list[Pair]:
    """Return the pairs of scans in a level; each scan is in one at most."""
    units = [u for u in level.atomic() if not u.is_whole]
    readers: dict[int, list[tuple[Unit | None, int]]] = {}
    for unit in units:
        for index, atom in enumerate(unit.ins):
            if isinstance(atom, int):
                readers.setdefault(atom, []).append((unit, index))
    for index, atom in enumerate(level.exits):
        if isinstance(atom, int):
            readers.setdefault(atom, []).append((None, index))
    scans = [u for u in units if wiring(u.eqn) is Wiring.SCAN and not u.eqn.effects]
    found: list[Pair] = []
    taken: set[Unit] = set()
    for second in reversed(scans):
        links = {u: _links(u, second) for u in scans if u not in taken and u is not second}
        first = max(links, key=lambda u: len(links[u]), default=None)
        if first is None or not links[first] or second in taken:
            continue
        taken |= {first, second}
        mine = {(second, index) for index in links[first]}
        outs = [(i, a) for i, a in enumerate(first.outs) if isinstance(a, int)]
        kept = (i for i, a in outs if {*readers.get(a, ())} - mine)
        found.append(Pair(first, second, links[first], frozenset(kept)))
    return found


def _links(first: Unit, second: Unit) -> dict[int, int]:
    """Return which operands that the second scan slices are stacks of the first."""
    if first.eqn.params["length"] != second.eqn.params["length"]:
        return {}
    mine, others = _Layout.of(first), _Layout.of(second)
    stacks = {a: i for i, a in enumerate(first.outs) if i >= mine.carries and isinstance(a, int)}
    sliced = [(i, a) for i, a in enumerate(second.ins) if i >= others.sliced]
    return {i: stacks[a] for i, a in sliced if isinstance(a, int) and a in stacks}


class _Layout(NamedTuple):
    """Operands of a scan: invariants, then carries, then what is sliced."""

    body: ClosedJaxpr
    invariants: int
    carries: int

    @classmethod
    def of(cls, unit: Unit) -> _Layout:
        wired = loop(unit.eqn)
        return cls(wired.body, wired.invariants, wired.carries)

    @property
    def sliced(self) -> int:
        """Return the first operand that is sliced."""
        return self.invariants + self.carries

    def parts(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split one value for each operand."""
        first, second = self.invariants, self.sliced
        return [*values[:first]], [*values[first:second]], [*values[second:]]


@dataclass(slots=True, eq=False)
class Joined:
    """The bodies of a pair as one level: an iteration of each, at the same index.

    Attributes:
      pair: the scans.
      level: the level.
      given: its inputs that are known numbers.
      entries: per scan and operand of it, the value of the level that it is.
      units: per scan its units.
      exits: per scan its results.
    """

    pair: Pair
    level: Level
    given: Given
    entries: tuple[list[Atom], list[Atom]]
    units: tuple[list[Unit], list[Unit]]
    exits: tuple[list[Atom], list[Atom]]


def join(pair: Pair, known: KnownNumbers) -> Joined:
    """Return the bodies of a pair as one level."""
    mine, others = map(_Layout.of, (pair.first, pair.second))
    level = Level(mine.body)
    entries: list[Atom] = [new_value(level, v.aval) for v in mine.body.jaxpr.invars]
    units, exits = open_into(level, mine.body, entries)
    fixed, _, sliced = mine.parts([*zip(pair.first.ins, entries, strict=True)])
    more: list[Atom] = []
    for i, (atom, var) in enumerate(zip(pair.second.ins, others.body.jaxpr.invars, strict=True)):
        shared = fixed if i < others.invariants else sliced if i >= others.sliced else []
        same = [entry for of_first, entry in shared if of_first is atom or of_first == atom]
        if i in pair.links:
            more.append(exits[pair.links[i]])
        else:
            more.append(same[0] if same else new_value(level, var.aval))
    later, results = open_into(level, others.body, more)
    level.units = [*units, *later]
    level.exits = [a for i, a in enumerate(exits) if i < mine.carries or i in pair.kept] + results
    own = [a for i, a in enumerate(more) if i not in pair.links and isinstance(a, int)]
    level.entries = [*dict.fromkeys([*entries, *own])]  # type: ignore[list-item]
    steady = [*zip(pair.first.ins, entries, strict=True)][: mine.invariants]
    steady += [*zip(pair.second.ins, more, strict=True)][: others.invariants]
    place = {entry: i for i, entry in enumerate(level.entries)}
    given = {place[e]: Outer(known, a) for a, e in steady if known.is_known(a)}  # type: ignore[index]
    return Joined(pair, level, given, (entries, more), (units, later), (exits, results))


class Together:
    """Emission of a pair with attentions across it as single equations."""

    def __init__(self, joined: Joined, changes: Changes) -> None:
        self.joined, self.changes = joined, changes

    def emit(self, emitter: Emitter, unit: Unit) -> Sequence[Any]:
        """Emit one of the two scans."""
        return self._first(emitter) if unit is self.joined.pair.first else self._second(emitter)

    def _first(self, outer: Emitter) -> list[Any]:
        """Emit the first scan: without what nobody reads, and with what the second now reads."""
        unit, (entries, _) = self.joined.pair.first, self.joined.entries
        layout = _Layout.of(unit)
        fixed, start, sliced = layout.parts([outer.read(a) for a in unit.ins])

        def body(carries: list[Any], slices: list[Any]) -> tuple[list[Any], Any]:
            inner = Emitter(self.joined.level, self.changes)
            inner.env.update(zip(entries, [*fixed, *carries, *slices], strict=True))  # type: ignore[arg-type]
            inner.run(self.joined.units[0])
            exits = enumerate(self.joined.exits[0])
            kept = range(layout.carries), self.joined.pair.kept
            results = [inner.read(a) if any(i in k for k in kept) else None for i, a in exits]
            return results[: layout.carries], (results[layout.carries :], self._left(inner))

        carries, (stacks, left) = lax.scan(body, start, sliced, **_words(unit))
        values = dict(zip(entries, [*fixed, *start, *sliced], strict=True))
        needed = {a: values[a] for a in entries if a in self._crossing.inputs}
        outer.handed[self] = needed, left
        return [*carries, *stacks]

    def _second(self, outer: Emitter) -> list[Any]:
        """Emit the second scan."""
        unit, (entries, more) = self.joined.pair.second, self.joined.entries
        layout, links = _Layout.of(unit), self.joined.pair.links
        operands = [None if i in links else outer.read(a) for i, a in enumerate(unit.ins)]
        fixed, start, sliced = layout.parts(operands)
        inputs, left = outer.handed[self]
        mine = _Layout.of(self.joined.pair.first)
        steady = {a: x for a, x in inputs.items() if a in entries[: mine.invariants]}
        stacks = {a: x for a, x in inputs.items() if a not in steady}

        def body(carries: list[Any], given: Any) -> tuple[list[Any], list[Any]]:
            slices, stacks, left = given
            inner = Emitter(self.joined.level, self.changes)
            inner.env |= steady | stacks
            read = zip(more, [*fixed, *carries, *slices], strict=True)
            inner.env.update((a, x) for a, x in read if isinstance(a, int) and x is not None)
            self._take(inner, left)
            inner.run(self.joined.units[1])
            results = [inner.read(a) for a in self.joined.exits[1]]
            return results[: layout.carries], results[layout.carries :]

        carries, results = lax.scan(body, start, (sliced, stacks, left), **_words(unit))
        return [*carries, *results]

    def _left(self, inner: Emitter) -> Any:
        """Return what the first body leaves to the second."""
        forwards = enumerate(self.changes.replacements)
        return {
            "values": {a: inner.env[a] for a in self._crossing.values},
            "forwards": {i: inner.forwards[r] for i, r in forwards if r in inner.forwards},
            "handed": [inner.handed[b] for b in self._crossing.bindings],
        }

    def _take(self, inner: Emitter, left: Any) -> None:
        """Set the second body up with what the first has left."""
        inner.env |= left["values"]
        inner.forwards |= {self.changes.replacements[i]: x for i, x in left["forwards"].items()}
        inner.handed |= zip(self._crossing.bindings, left["handed"], strict=True)
        for unit in self._crossing.again:
            with jax_compat.emitting(unit.eqn):
                inner.bind(unit)
        for value in self._crossing.held:
            inner.env[value] = inner.holding(value)

    @cached_property
    def _crossing(self) -> _Crossing:
        return _crossing(self.joined, self.changes)


def _words(unit: Unit) -> dict[str, Any]:
    names = ("length", "reverse", "unroll", "_split_transpose")
    return {name: unit.eqn.params[name] for name in names if name in unit.eqn.params}


class _Crossing(NamedTuple):
    """Values of the first body that the second reads.

    Attributes:
      inputs: invariants and slices of the first.
      values: what it has computed.
      again: equations that depend on invariants alone, and are cheap.
      held: values that hold results of attentions.
      bindings: pairs of loops in the bodies.
    """

    inputs: list[int]
    values: list[int]
    again: list[Unit]
    held: list[int]
    bindings: list[Any]


def _crossing(joined: Joined, changes: Changes) -> _Crossing:
    emitter = Emitter(joined.level, changes)
    first, second = (set().union(*map(made, units)) for units in joined.units)
    reads = {a for a in joined.exits[1] if isinstance(a, int)}
    reads |= set(_reads(emitter, joined.units[1]))
    for r in changes.replacements:
        if any(value in second and value in emitter.live for value in r.found.cut):
            reads |= emitter.needed(r)
    layout = _Layout.of(joined.pair.first)
    fixed, carries, sliced = (
        {a for a in part if isinstance(a, int)} for part in layout.parts(joined.entries[0])
    )
    steady = _steady(joined.units[0], fixed | joined.level.constants.keys())
    held = [a for a in sorted(reads & first) if a in emitter.held and emitter.held[a][1] == "out"]
    reads -= {*held}
    again = _makers(reads & steady.keys(), steady)
    inputs = reads | {a for u in again for a in u.ins if isinstance(a, int)}
    return _Crossing(
        sorted(inputs & (fixed | sliced)),
        sorted((reads & (first | carries)) - steady.keys()),
        again,
        held,
        [b for u, b in changes.bindings.items() if u in emitter.units and made(u) <= second],
    )


def _reads(emitter: Emitter, units: Sequence[Unit]) -> Iterator[int]:
    """Yield what units read as they are emitted."""
    for unit in units:
        if unit.inside is None or unit.is_whole:
            if unit in emitter.units:
                yield from (a for a in unit.ins if isinstance(a, int))
        elif emitter.is_opened(unit):
            yield from _reads(emitter, unit.inside)
        elif emitter.is_bound(unit):
            yield from (a for a in unit.ins if isinstance(a, int))


def _steady(units: Sequence[Unit], fixed: set[int]) -> dict[int, Unit]:
    """Return values that are cheap and the same in every iteration, with their makers."""
    known, found = set(fixed), dict[int, Unit]()
    for unit in units:
        if unit.inside is not None:
            inside = _steady(unit.inside, known)
            known |= inside.keys()
            found |= inside
            continue
        op = lookup(unit.eqn.primitive)
        if op is None or op.kind is OpKind.COMPUTE or unit.eqn.effects or nested(unit.eqn):
            continue
        if all(a in known for a in unit.ins if isinstance(a, int)):
            known |= made(unit)
            found |= dict.fromkeys(made(unit), unit)
    return found


def _makers(values: set[int], makers: dict[int, Unit]) -> list[Unit]:
    """Return the units that make some values, in order."""
    wanted, pending = dict[Unit, None](), sorted(values)
    while pending:
        unit = makers.get(pending.pop())
        if unit is not None and unit not in wanted:
            wanted[unit] = None
            pending += [a for a in unit.ins if isinstance(a, int)]
    return [u for u in dict.fromkeys(makers.values()) if u in wanted]
