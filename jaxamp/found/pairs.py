"""Two scans, or two mapped functions, of which the second reads what the first hands over.

So JAX differentiates a scan: the first stacks residuals, and the second reads them at the same
index, whichever way it goes. Both bodies are one program, iteration by iteration or device by
device. A region whose forward pass is in one and whose backward pass is in the other is found
there like any other; what is emitted are two equations again.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxamp.core import jax_compat
from jaxamp.found.emit_level import Changes, Emitter
from jaxamp.found.levels import Atom, Given, Level, Unit, made, new_value, numbers, open_into
from jaxamp.found.region import Emission
from jaxamp.jaxprs.known_arrays import KnownArrays
from jaxamp.jaxprs.nested import Loop, Wiring, called, loop, wiring


class Pair(NamedTuple):
    """Two scans, or two functions mapped over devices; the second reads residuals of the first."""

    first: Unit
    second: Unit
    links: dict[int, int]  # per operand of the second that is a result of the first, which one
    kept: frozenset[int]  # results of the first that others read


def pairs_of(level: Level) -> list[Pair]:
    """Return the pairs in a level; each equation is in one at most."""
    units = [*level.atomic()]
    reads = Counter(numbers(itertools.chain(level.exits, *(u.ins for u in units))))
    loops = [u for u in units if _is_paired(u)]
    found: list[Pair] = []
    taken: set[Unit] = set()
    for i, second in reversed([*enumerate(loops)]):
        links = {u: _links(u, second) for u in loops[:i] if u not in taken}
        first = max(links, key=lambda u: len(links[u]), default=None)
        if first is None or not links[first] or second in taken:
            continue
        taken |= {first, second}
        linked = Counter(second.ins[index] for index in links[first])
        outs = [(i, a) for i, a in enumerate(first.outs) if isinstance(a, int)]
        kept = (i for i, a in outs if reads[a] > linked[a])
        found.append(Pair(first, second, links[first], frozenset(kept)))
    return found


def _is_paired(unit: Unit) -> bool:
    return (wiring(unit.eqn) is Wiring.SCAN or _is_mapped(unit)) and not unit.eqn.effects


def _is_mapped(unit: Unit) -> bool:
    return unit.eqn.primitive.name == "shard_map"


def _links(first: Unit, second: Unit) -> dict[int, int]:
    """Return which operands of the second are residuals of the first."""
    if first.eqn.primitive is not second.eqn.primitive:
        return {}
    names = ("mesh", "newly_manual_axes", "check_vma") if _is_mapped(first) else ("length",)
    if any(first.eqn.params[name] != second.eqn.params[name] for name in names):
        return {}
    carries, before = _wired(first).carries, _sliced(_wired(second))
    stacks = {a: i for i, a in enumerate(first.outs) if i >= carries and isinstance(a, int)}
    slices = [(i, a) for i, a in enumerate(second.ins) if i >= before and isinstance(a, int)]
    links = {i: stacks[a] for i, a in slices if a in stacks}
    if _is_mapped(first):
        given, read = first.eqn.params["out_specs"], second.eqn.params["in_specs"]
        return {i: j for i, j in links.items() if given[j] == read[i]}
    return links


def _wired(unit: Unit) -> Loop:
    """Return the wiring of a scan; that of a mapped function, of which each device has a slice."""
    if _is_mapped(unit):
        return Loop(None, called(unit.eqn), 0, 0, 0, None)
    return loop(unit.eqn)


def _sliced(wired: Loop) -> int:
    return wired.invariants + wired.carries


@dataclass(slots=True, eq=False)
class Joined:
    """The bodies of a pair as one level: an iteration of each, at the same index."""

    pair: Pair
    level: Level
    given: Given
    entries: tuple[list[Atom], list[Atom]]  # for both, the values that its operands are
    units: tuple[list[Unit], list[Unit]]
    exits: tuple[list[Atom], list[Atom]]


def join(pair: Pair, known: KnownArrays) -> Joined:
    """Return the bodies of a pair as one level."""
    mine, others = map(_wired, (pair.first, pair.second))
    level = Level(mine.body)
    entries: list[Atom] = [new_value(level, v.aval) for v in mine.body.jaxpr.invars]
    units, exits = open_into(level, mine.body, entries, pair.first.scope)
    _, fixed, _, sliced = mine.parts([*zip(pair.first.ins, entries, strict=True)])
    more: list[Atom] = []
    for i, (atom, var) in enumerate(zip(pair.second.ins, others.body.jaxpr.invars, strict=True)):
        shared = fixed if i < others.invariants else sliced if i >= _sliced(others) else []
        same = [entry for of_first, entry in shared if of_first is atom or of_first == atom]
        if same and _is_mapped(pair.first):
            of_first, of_second = (unit.eqn.params["in_specs"] for unit in pair[:2])
            same = same if of_first[entries.index(same[0])] == of_second[i] else []
        if i in pair.links:
            more.append(exits[pair.links[i]])
        else:
            more.append(same[0] if same else new_value(level, var.aval))
    later, results = open_into(level, others.body, more, pair.second.scope)
    level.units = [*units, *later]
    level.exits = [a for i, a in enumerate(exits) if i < mine.carries or i in pair.kept] + results
    own = [a for i, a in enumerate(more) if i not in pair.links and isinstance(a, int)]
    level.entries = [*dict.fromkeys([*entries, *own])]  # type: ignore[list-item]
    steady = [*zip(pair.first.ins, entries, strict=True)][: mine.invariants]
    steady += [*zip(pair.second.ins, more, strict=True)][: others.invariants]
    given = {e: (known, a) for a, e in steady if a in known and isinstance(e, int)}
    return Joined(pair, level, given, (entries, more), (units, later), (exits, results))


class Together:
    """Emission of a pair with the regions across it replaced."""

    def __init__(self, joined: Joined, changes: Changes) -> None:
        self.joined, self.changes = joined, changes
        self.crossing = _crossing(joined, changes)

    def emit(self, emitter: Emitter, unit: Unit) -> Sequence[Any]:
        """Emit one of the two equations; of its results those that nobody reads are ``None``."""
        return self._first(emitter) if unit is self.joined.pair.first else self._second(emitter)

    def _first(self, outer: Emitter) -> list[Any]:
        """Emit the first: without what nobody reads, and with what the second now reads."""
        unit, (entries, _) = self.joined.pair.first, self.joined.entries
        wired = _wired(unit)
        _, fixed, start, sliced = wired.parts([outer.read(a) for a in unit.ins])

        def body(carries: list[Any], slices: list[Any]) -> tuple[list[Any], Any]:
            inner = Emitter(self.joined.level, self.changes)
            inner.env.update(zip(entries, [*fixed, *carries, *slices], strict=True))  # type: ignore[arg-type]
            inner.run(self.joined.units[0])
            exits = self.joined.exits[0]
            stacks = {i: inner.read(exits[i]) for i in self._kept()}
            return [inner.read(a) for a in exits[: wired.carries]], (stacks, self._left(inner))

        specs = self._specs_of_first() if _is_mapped(unit) else None
        carries, (stacks, left) = _bound(unit, body, start, sliced, specs)
        values = dict(zip(entries, [*fixed, *start, *sliced], strict=True))
        outer.handed[self] = {a: values[a] for a in self.crossing.inputs}, left
        return [*carries, *(stacks.get(i) for i in range(wired.carries, len(unit.outs)))]

    def _second(self, outer: Emitter) -> list[Any]:
        unit, (entries, more) = self.joined.pair.second, self.joined.entries
        wired, links = _wired(unit), self.joined.pair.links
        operands = [None if i in links else outer.read(a) for i, a in enumerate(unit.ins)]
        _, fixed, start, sliced = wired.parts(operands)
        slices = {i: x for i, x in enumerate(sliced, _sliced(wired)) if x is not None}
        inputs, left = outer.handed[self]
        steady = {*entries[: _wired(self.joined.pair.first).invariants]}
        stacks = {a: x for a, x in inputs.items() if a not in steady}

        def body(carries: list[Any], given: Any) -> tuple[list[Any], list[Any]]:
            slices, stacks, left = given
            inner = Emitter(self.joined.level, self.changes)
            inner.env |= inputs | stacks
            read = dict(enumerate([*fixed, *carries])) | slices
            inner.env.update((a, read[i]) for i, a in enumerate(more) if i in read)  # type: ignore[misc]
            self._take(inner, left)
            inner.run(self.joined.units[1])
            results = [inner.read(a) for a in self.joined.exits[1]]
            return results[: wired.carries], results[wired.carries :]

        specs = self._specs_of_second(slices, stacks) if _is_mapped(unit) else None
        carries, results = _bound(unit, body, start, (slices, stacks, left), specs)
        return [*carries, *results]

    def _kept(self) -> list[int]:
        first, kept = self.joined.pair.first, self.joined.pair.kept
        return [i for i in sorted(kept) if i >= _wired(first).carries]

    def _left(self, inner: Emitter) -> Any:
        """Return what the first body leaves to the second."""
        left = {
            "values": {a: inner.env[a] for a in self.crossing.values},
            "forwards": {i: self._emission(inner, i).forward for i in self.crossing.forwards},
            "handed": [inner.handed[b] for b in self.crossing.bindings],
        }
        if _is_mapped(self.joined.pair.first):  # along an axis for the devices
            left = jax.tree.map(lambda x: jnp.expand_dims(x, 0), left)
        return left

    def _take(self, inner: Emitter, left: Any) -> None:
        """Set the second body up with what the first has left."""
        if _is_mapped(self.joined.pair.first):
            left = jax.tree.map(lambda x: jnp.squeeze(x, 0), left)
        inner.env |= left["values"]
        for i, forward in left["forwards"].items():
            self._emission(inner, i).forward = forward
        inner.handed |= zip(self.crossing.bindings, left["handed"], strict=True)
        for value in self.crossing.held:
            inner.env[value] = inner.holding(value)

    def _emission(self, inner: Emitter, index: int) -> Emission:
        return inner.emissions[self.changes.regions[index]]

    # Which axes of a mesh are those of arrays that enter and leave mapped functions.

    def _specs_of_first(self) -> tuple[Any, Any]:
        params = self.joined.pair.first.eqn.params
        kept = {i: params["out_specs"][i] for i in self._kept()}
        return list(params["in_specs"]), (kept, self._specs_of_left())

    def _specs_of_second(self, slices: Any, stacks: Any) -> tuple[Any, Any]:
        first, second = (u.eqn.params for u in (self.joined.pair.first, self.joined.pair.second))
        entries = self.joined.entries[0]
        own = {i: second["in_specs"][i] for i in slices}
        shared = {a: first["in_specs"][entries.index(a)] for a in stacks}
        return (own, shared, self._specs_of_left()), list(second["out_specs"])

    def _specs_of_left(self) -> Any:
        params = self.joined.pair.first.eqn.params
        names, mapped = params["mesh"].axis_names, params["newly_manual_axes"]
        avals = self.joined.level.avals

        def spec(*values: int) -> PartitionSpec:
            """Return along which axes of the mesh any of some values may differ."""
            axes = frozenset(mapped)
            if params["check_vma"]:  # without it types do not say
                axes = frozenset().union(*(jax_compat.varies_over(avals[a]) for a in values))
            return PartitionSpec(tuple(n for n in names if n in axes))

        regions = {i: self.changes.regions[i] for i in self.crossing.forwards}
        return {
            "values": {a: spec(a) for a in self.crossing.values},
            "forwards": {i: [spec(*r.needed)] * r.handed for i, r in regions.items()},
            "handed": [],
        }


def _bound(
    unit: Unit, body: Callable[..., Any], start: Sequence[Any], given: Any, specs: Any
) -> tuple[Sequence[Any], Any]:
    """Bind a scan or mapped function with another body, of its carries and of other operands."""
    params = unit.eqn.params
    if not _is_mapped(unit):
        names = ("length", "reverse", "unroll", "_split_transpose")
        words = {name: params[name] for name in names if name in params}
        return lax.scan(body, start, given, **words)
    mapped = jax.shard_map(
        lambda given: body(start, given)[1],
        mesh=params["mesh"],
        in_specs=(specs[0],),
        out_specs=specs[1],
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return [], mapped(given)


class _Crossing(NamedTuple):
    """Values of the first body that the second reads."""

    inputs: list[int]  # invariants and slices of the first
    values: list[int]  # what it has computed
    held: list[int]  # values that regions make
    forwards: list[int]  # regions with their forward pass in the first, and results in the second
    bindings: list[Together]  # pairs that are in both bodies


def _crossing(joined: Joined, changes: Changes) -> _Crossing:
    emitter = Emitter(joined.level, changes)
    first, second = (set().union(*map(made, units)) for units in joined.units)
    reads = {*numbers(joined.exits[1]), *_reads(emitter, joined.units[1])}

    def is_held(value: int) -> bool:
        region = emitter.held.get(value)
        if region is None:
            return False
        return region.follows(value, operands=bool(region.made & emitter.live & second))

    held = [a for a in sorted(reads & first) if is_held(a)]
    reads -= {*held}
    forwards = []
    for i, r in enumerate(changes.regions):
        made_here = r.made & emitter.live
        if made_here & second:
            reads |= r.needed
        if made_here & first and (made_here & second or not r.made.isdisjoint(held)):
            forwards.append(i)
    parts = _wired(joined.pair.first).parts(joined.entries[0])
    _, fixed, carries, sliced = ({*numbers(part)} for part in parts)
    inputs, values = sorted(reads & (fixed | sliced)), sorted(reads & (first | carries))
    pairs = ((b, b.joined.pair) for b in dict.fromkeys(changes.bindings.values()))
    both = [b for b, pair in pairs if made(pair.first) <= first and made(pair.second) <= second]
    return _Crossing(inputs, values, held, forwards, both)


def _reads(emitter: Emitter, units: Sequence[Unit]) -> Iterator[int]:
    """Yield what units read as they are emitted."""
    for unit in units:
        if emitter.stays(unit):
            is_opened = emitter.is_opened(unit)
            yield from _reads(emitter, unit.inside or ()) if is_opened else numbers(unit.ins)
