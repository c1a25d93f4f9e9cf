"""Find what is computed of logits token by token, and what the program reads of it.

The softmax, the loss, its cotangents and whatever else a program makes of the logits of a token are
the program's own equations. They are found by following the tokens through equations that treat
each row by itself: nothing of them is known but that. What has the size of the logits is computed
for some tokens at a time, and not stored; what the rest of the program reads of it has fewer
numbers: rows of a few, and sums over tokens.

A pass over the tokens makes all that depends on no sum over tokens; the next makes the rest, with
the logits computed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jaxamp.found.cross_entropy.rows import Flow, Rows, flow
from jaxamp.found.cross_entropy.rule_programs import programs_of
from jaxamp.found.levels import Atom, Level, Unit, known_in, numbers, open_level
from jaxamp.jaxprs.known_arrays import KnownArrays
from jaxamp.jaxprs.nested import RULED, nested

MOST_PASSES = 2
_EXPONENTIALS = ("exp", "exp2")
MOVES = ("transpose", "convert_element_type", "reshape", "squeeze", "copy", "pvary",
         "stop_gradient", "name")  # fmt: skip

Key = tuple[int, Rows | None]
"""A value of the program, and where its tokens are; all of it for ``None``."""

At = tuple[int, Rows | None]
"""An operand by its index, and where its tokens are."""

End = tuple[Atom, Rows | None]
"""A result of a program, and where its tokens are."""


class Step(NamedTuple):
    """An equation that is computed for some tokens at a time.

    Attributes:
      unit: the equation.
      flow: how tokens go through it.
      operands: the values that it reads.
      places: of a lookup, per number of an index the axis of the indices that it counts.
      turned: of a product, which operands the program transposes before.
      rule: of a function with a derivative of its own.
    """

    unit: Unit
    flow: Flow
    operands: tuple[Key | Literal, ...]
    places: Sequence[int | None]
    turned: Sequence[bool]
    rule: Rule | None


@dataclass(slots=True, eq=False)
class Pass:
    """Equations that are computed in one pass over the tokens.

    Attributes:
      steps: the equations, in order, by how tokens go through them.
      inputs: the values that they read, in parts or whole.
      outputs: per value that the program reads, where its tokens are; ``None`` for sums over them.
    """

    steps: dict[tuple[Unit, Flow], Step] = field(default_factory=dict)
    inputs: dict[Key, None] = field(default_factory=dict)
    outputs: dict[int, Rows | None] = field(default_factory=dict)

    @property
    def values(self) -> frozenset[int]:
        """All values that are made of some tokens at a time."""
        return frozenset(a for unit, _ in self.steps for a in numbers(unit.outs))

    def sums(self) -> Iterator[tuple[int, Any]]:
        """Yield the outputs that are sums over tokens, and their types."""
        for step in self.steps.values():
            for value, var in zip(step.unit.outs, step.unit.eqn.outvars, strict=True):
                if isinstance(value, int) and self.outputs.get(value, value) is None:
                    yield value, var.aval

    @property
    def backward(self) -> bool:
        """The presence of cotangents: products with more matrices than that of the logits."""
        flows = [step.flow for step in self.steps.values() if _contracts(step.unit)]
        return any(f.result is None for f in flows) or sum(None in f.operands for f in flows) > 1

    @property
    def pushes(self) -> bool:
        """The presence of rules for tangents, whose forward mode no loop of chunks keeps."""
        return any(unit.eqn.primitive.name == "custom_jvp_call" for unit, _ in self.steps)

    @property
    def caps(self) -> int:
        """The number of equations as of a soft cap."""
        return sum(step.unit.eqn.primitive.name == "tanh" for step in self.steps.values())


class Body(NamedTuple):
    """A program of a rule as it is computed for some tokens at a time.

    Attributes:
      made: what is computed.
      reads: per operand that is read, and where its tokens are, the value that it is.
      constants: what it holds.
      exits: its results.
    """

    made: Pass
    reads: dict[At, Key]
    constants: dict[Key, Any]
    exits: Sequence[End]


class Rule(NamedTuple):
    """A function with a derivative of its own, for some tokens at a time.

    Attributes:
      forward, backward: its programs, see `programs_of`.
      moving: indices of the operands that have cotangents.
      smooth: per result whether its cotangent is read.
      is_linear: whether all cotangents are linear in those of the results.
    """

    forward: Body
    backward: Body
    moving: Sequence[int]
    smooth: Sequence[bool]
    is_linear: bool


class Logits(NamedTuple):
    """A product of activations and a matrix, or several, of which an axis counts tokens.

    Attributes:
      unit: the product.
      rows: where its tokens are.
      side: which operand has them.
      width: the number of products that a logit is a sum of.
      heads: the number of matrices that are multiplied at once.
      multiplies_given: whether the matrix is given to a level, and the activations are made there;
        that tells several heads from the scores of attention, and words from tokens.
    """

    unit: Unit
    rows: Rows
    side: int
    width: int
    heads: int
    multiplies_given: bool

    @property
    def matrix(self) -> Any:
        """The type of the matrix."""
        return self.unit.eqn.invars[1 - self.side].aval

    @property
    def words(self) -> int:
        """The number of logits of each token."""
        return self.matrix.size // (self.width * self.heads)


def before_exponentials(level: Level) -> list[Unit]:
    """Return the products whose results an exponential may read before another product does.

    No others are logits. To follow each product to the end takes time that grows with the square of
    a program: nine of the ten seconds in which a step of a ViT-B was traced.
    """
    products: list[Unit] = []
    sources: dict[int, int] = {}  # per value, a bit for each product
    found = 0
    for unit in level.equations():
        name, source = unit.eqn.primitive.name, 0
        if name == "dot_general":
            source = 1 << len(products)
            products.append(unit)
        else:
            for value in numbers(unit.ins):
                source |= sources.get(value, 0)
        if source:
            sources.update(dict.fromkeys(numbers(unit.outs), source))
        if name in _EXPONENTIALS or (source and _is_ruled(unit.eqn)):
            found |= source
    return [unit for number, unit in enumerate(products) if found >> number & 1]


def logits_of(unit: Unit, level: Level) -> list[Logits]:
    """Return the axes of a product that may count tokens, the longest first."""
    lhs, rhs, out = (v.aval.shape for v in (*unit.eqn.invars, *unit.eqn.outvars))  # type: ignore[attr-defined]
    (contracted, _), (batch, _) = unit.eqn.params["dimension_numbers"]
    shared = len(contracted) + len(batch)
    if shared in (len(lhs), len(rhs)):
        return []
    width, heads = math.prod(lhs[i] for i in contracted), math.prod(out[: len(batch)])
    first = len(lhs) - len(contracted)  # axis of the result that is of the second operand
    made = [source(level, atom) in level.makers for atom in unit.ins]
    given = [made == [True, False], made == [False, True]]
    found = [
        Logits(unit, Rows(axis, 1, 1, 0, n), side, width, heads, given[side])
        for axis, n in enumerate(out)
        if n > 1 and axis >= len(batch) and (given[side := int(axis >= first)] or not batch)
    ]
    return sorted(found, key=lambda logits: -logits.rows.length)


def source(level: Level, atom: Atom) -> Atom:
    """Return the value that another one is moved from."""
    unit = level.makers.get(atom) if isinstance(atom, int) else None
    if unit is None or unit.eqn.primitive.name not in MOVES:
        return atom
    return source(level, unit.ins[0])


class Stays(Exception):
    """Ends the search of a loss that stays as it is, with the reason."""


def _exponentiates(eqn: JaxprEqn) -> bool:
    """Return whether an equation is an exponential, or holds one."""
    inside = (inner for body in nested(eqn) for inner in body.jaxpr.eqns)
    return eqn.primitive.name in _EXPONENTIALS or any(map(_exponentiates, inside))


def _is_ruled(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a function of exponentials with a derivative of its own."""
    return eqn.primitive.name in RULED and _exponentiates(eqn)


def _atom(key: Key | Literal) -> Atom:
    return key if isinstance(key, Literal) else key[0]


def _is_linear(name: str, own: Sequence[bool]) -> bool:
    """Return whether a result is linear in those operands that are its own."""
    match name:
        case "mul" | "dot_general":
            return sum(own) == 1
        case "div" | "gather":
            return own == [True, False]
        case "add" | "sub" | "add_any" | "pad":
            return all(own)
        case "select_n":
            return not own[0] and all(own[1:])
    return name in (*MOVES, "neg", "broadcast_in_dim", "reduce_sum")


def _contracts(unit: Unit) -> bool:
    """Return whether an equation is a product that sums over something."""
    numbers = unit.eqn.params.get("dimension_numbers")
    return unit.eqn.primitive.name == "dot_general" and bool(numbers[0][0])  # type: ignore[index]


@dataclass(slots=True)
class Search:
    """Search of what is computed token by token, from one product.

    Attributes:
      level: where it is.
      known: the known numbers of that.
      logits: the product.
      taken: values that are made in chunks of other losses.
      rows: per value that depends on it and is computed token by token, where its tokens are; at
        first of it alone, or of what the program of a rule is given.
      is_inside: whether it goes through such a program.
      stage: per value that depends on it, the pass in which it is made, or after which.
      flows: how tokens go through equations.
      sums: sums over tokens that are part of a pass.
    """

    level: Level
    known: KnownArrays
    logits: Logits
    taken: frozenset[int]
    rows: dict[int, Rows]
    is_inside: bool = False
    stage: dict[int, int] = field(default_factory=dict)
    flows: dict[Unit, Flow] = field(default_factory=dict)
    rules: dict[Unit, Rule] = field(default_factory=dict)
    sums: set[int] = field(default_factory=set)
    is_softmax: bool = False
    _wide: set[int] = field(default_factory=set)  # values of the size of the logits, made of them
    _powers: set[int] = field(default_factory=set)  # values that exponentials of logits are in

    def passes(self) -> list[Pass]:
        """Return what is computed in each pass; none without a softmax of each token's logits.

        What is added up of losses and other small numbers is part of a pass, if it can be: XLA
        reads logits once for that and their cotangents.
        """
        made = flow(self.logits.unit.eqn, result=self.logits.rows)
        assert made is not None
        self.flows[self.logits.unit] = made
        self._follow()
        return self._read() if self.is_softmax else []

    def is_big(self, value: int, rows: Rows | None) -> bool:
        """Return whether a value that is computed token by token has the size of the logits."""
        size = self.logits.unit.eqn.outvars[0].aval.size  # type: ignore[attr-defined]
        return rows is not None and 2 * self.level.avals[value].size >= size

    def _follow(self) -> None:
        """Follow the tokens from where they are known on."""
        self.stage.update(dict.fromkeys(self.rows, 1))
        self._wide.update(value for value, rows in self.rows.items() if self.is_big(value, rows))
        for unit in self.level.equations():
            if tainted := [a for a in numbers(unit.ins) if a in self.stage]:
                self._step(unit, tainted)

    def _step(self, unit: Unit, tainted: list[int]) -> None:
        outs = numbers(unit.outs)
        if self._is_sum(unit, tainted):
            self.flows[unit] = Flow((None,) * len(unit.ins), None)
            self.stage[outs[0]] = max(self.stage[a] for a in tainted)
            self.sums.add(outs[0])
            return
        found = self._flow(unit)
        if found is None:
            if not self._wide.isdisjoint(tainted) and _is_ruled(unit.eqn):
                raise Stays("its softmax has a derivative rule that is not of each token")
            self.stage.update(dict.fromkeys(outs, max(self.stage[a] for a in tainted)))
            return
        self.stage.update(
            dict.fromkeys(outs, max(self.stage[a] + (a not in self.rows) for a in tainted))
        )
        self.flows[unit] = found
        big = [a for a in tainted if a in self._wide]
        if found.result is not None:
            if _contracts(unit) and None in found.operands and big:
                return  # the cotangents of activations, from which the rest of the program follows
            self.rows.update(dict.fromkeys(outs, found.result))
            self._wide.update(out for out in outs if big and self.is_big(out, found.result))
        elif big or (
            self.stage[outs[0]] == 1  # no second pass for small numbers alone
            and self.taken.isdisjoint(outs)
            and not any(self.is_big(a, self.rows.get(a)) for a in tainted)
        ):
            self.sums.update(outs)
        name = unit.eqn.primitive.name
        if (name in _EXPONENTIALS and big) or not self._powers.isdisjoint(tainted):
            self._powers.update(outs)
        if name == "reduce_sum" and found.result is not None and not self._powers.isdisjoint(big):
            self.is_softmax |= self._is_over_words(big[0], outs[0])

    def _flow(self, unit: Unit) -> Flow | None:
        """Return how tokens go through an equation; ``None`` if it mixes them, or has an effect."""
        given = [self.rows.get(a) if isinstance(a, int) else None for a in unit.ins]
        if not any(given) or unit.eqn.effects:
            return None
        if unit.eqn.primitive.name in RULED and not self._wide.isdisjoint(numbers(unit.ins)):
            try:
                found, self.rules[unit] = self._rule(unit, given)
            except Stays:
                return None
        else:
            found = flow(unit.eqn, given, self.places(unit))
        if found is None or any(
            self.rows.get(a, rows) != rows
            for a, rows in zip(unit.ins, found.operands, strict=True)
            if isinstance(a, int)
        ):
            return None
        return found

    def _is_over_words(self, summed: int, total: int) -> bool:
        """Return whether a sum is over all words of a token, or over those of one head of some."""
        avals = self.level.avals
        heads = round(self.logits.words * avals[total].size / avals[summed].size)
        return heads == 1 or (heads > 1 and self.logits.multiplies_given)

    def _is_sum(self, unit: Unit, tainted: list[int]) -> bool:
        """Return whether a result is the sum of what it is for each chunk, made of such sums.

        That is so of a mean, and of what means add up to.
        """
        if not self.sums.issuperset(tainted) or len({self.stage[a] for a in tainted}) > 1:
            return False
        name = unit.eqn.primitive.name
        if name == "transpose":
            return True
        if unit.eqn.outvars[0].aval.shape or not self.taken.isdisjoint(numbers(unit.outs)):  # type: ignore[attr-defined]
            return False
        return name != "reduce_sum" and _is_linear(name, [a in tainted for a in unit.ins])

    def places(self, unit: Unit) -> Sequence[int | None]:
        """Return per number of the indices of a lookup which of their axes it counts."""
        numbering = unit.eqn.params.get("dimension_numbers")
        axes = getattr(numbering, "start_index_map", None)
        axes = getattr(numbering, "scatter_dims_to_operand_dims", axes)
        if not axes or len(axes) < 2:
            return ()
        return [self._counted(unit.ins[1], i) for i in range(len(axes))]

    def _counted(self, indices: Atom, number: int) -> int | None:
        """Return the axis of indices that one of their numbers is the place along."""
        if indices in self.known:
            column = self.known.whole(indices)[..., number]
            for axis, size in enumerate(column.shape):
                if size > 1 and (np.moveaxis(column, axis, -1) == np.arange(size)).all():
                    return axis
            return None
        unit = self.level.makers.get(indices) if isinstance(indices, int) else None
        if unit is None or unit.eqn.primitive.name != "concatenate":
            return None
        for atom, var in zip(unit.ins, unit.eqn.invars, strict=True):
            *axes, size = var.aval.shape  # type: ignore[attr-defined]
            if unit.eqn.params["dimension"] < len(axes):
                return None
            if number < size:
                return self._counted(atom, number)
            number -= size
        return None

    # Functions with a derivative of their own.

    def _rule(self, unit: Unit, given: Sequence[Rows | None]) -> tuple[Flow, Rule]:
        """Return how tokens go through a function with a derivative of its own, and that."""
        try:
            *programs, moving = programs_of(unit.eqn)
        except Exception as error:  # of the user's own
            raise Stays("its derivative cannot be traced") from error
        count = len(unit.outs)
        forward = self._inside(unit, programs[0], given)
        self.is_softmax |= forward.is_softmax
        made, saved = forward.level.exits[:count], forward.level.exits[count:]
        (result, *others) = {forward._place(a) for a in made}
        outs = [(a, result) for a in made]
        places = {i: rows for i, rows in forward._body(outs).reads if rows is not None}
        backward = self._inside(unit, programs[1], [*[result] * count, *map(forward._place, saved)])
        ends = [(a, places.get(i)) for a, i in zip(backward.level.exits, moving, strict=True)]
        pulled = backward._body(ends)
        kept = [(saved[i - count], rows) for i, rows in pulled.reads if i >= count]
        whole = forward._body(outs, kept)
        if others or any(sum(i == j for j, _ in whole.reads) > 1 for i in moving):
            raise Stays("a rule mixes tokens")
        smooth = [(i, result) in pulled.reads for i in range(count)]
        is_linear = backward._is_linear(pulled, backward.level.entries[:count])
        flowing = Flow(tuple(map(places.get, range(len(unit.ins)))), result)
        return flowing, Rule(whole, pulled, moving, smooth, is_linear)

    def _inside(self, unit: Unit, closed: ClosedJaxpr, rows: Sequence[Rows | None]) -> Search:
        """Return the search of a program of a rule, given where tokens of its operands are."""
        level = open_level(closed, unit.scope, is_final=True)
        places = zip(level.entries, rows, strict=True)
        start = {value: rows for value, rows in places if rows is not None}
        search = Search(level, known_in(level, {}), self.logits, frozenset(), start, is_inside=True)
        search._follow()
        return search

    def _place(self, atom: Atom) -> Rows | None:
        return self.rows.get(atom) if isinstance(atom, int) else None

    def _body(self, results: Sequence[End], saved: Sequence[End] = ()) -> Body:
        """Return what makes results, and what a backward pass reads.

        Results of no token add up over chunks; of what is read later there is no such sum.
        """
        made, exits = Pass(), [*results, *saved]
        pending: list[tuple[Unit, Flow]] = []
        for value, rows in exits:
            if isinstance(value, int):
                is_here = self.stage.get(value, 1) == 1 and made.outputs.get(value, rows) == rows
                if not is_here or (value in self.stage and self.rows.get(value) != rows):
                    raise Stays("a rule mixes tokens")
                made.outputs[value] = rows
                self._need((value, rows), pending, made, 1)
        self._make(pending, made, 1)
        if not self.sums.isdisjoint(numbers(a for a, _ in saved)) or not all(
            rows or self._is_zero(a) or a in [*self.sums] for a, rows in results
        ):
            raise Stays("a rule mixes tokens")
        self._sort(made)
        entries = {value: i for i, value in enumerate(self.level.entries)}
        reads = {(entries[key[0]], key[1]): key for key in made.inputs if key[0] in entries}
        consts = {k: self.level.constants[k[0]] for k in made.inputs if k[0] not in entries}
        if any(rows or isinstance(const, Tracer) for (_, rows), const in consts.items()):
            raise Stays("a rule holds arrays of tokens")
        return Body(made, reads, consts, exits)

    def _is_zero(self, atom: Atom) -> bool:
        return atom in self.known and not self.known.thin(atom).any()

    def _is_linear(self, body: Body, cotangents: Sequence[int]) -> bool:
        """Return whether all results are linear in cotangents."""
        moving: list[Atom] = [*cotangents]
        for step in body.made.steps.values():
            read = [*map(_atom, step.operands)]
            if not any(a in moving for a in read):
                continue
            own = [self._is_zero(a) or a in moving for a in read]
            if not _is_linear(step.unit.eqn.primitive.name, own):
                return False
            moving += step.unit.outs
        return all(self._is_zero(a) or a in moving for a, _ in body.exits)

    # What the program reads.

    def _read(self) -> list[Pass]:
        """Return the passes that make what the rest of the program reads."""
        passes = [Pass() for _ in range(MOST_PASSES)]
        wanted = {*numbers(self.level.exits)}
        if not wanted.isdisjoint(self._wide):
            raise Stays("logits are returned")
        for unit in reversed([*self.level.equations()]):
            outs = [a for a in numbers(unit.outs) if a in wanted]
            if not outs and not unit.eqn.effects:
                continue
            big = self._wide.intersection(numbers(unit.ins))
            is_sum = bool(outs) and self.sums.issuperset(outs)
            if not self._wide.isdisjoint(outs) or (big and unit not in self.flows):
                raise Stays(f"logits are read by {unit.eqn.primitive.name}")
            if not big and not is_sum:
                wanted.update(numbers(unit.ins))
                continue
            for out in outs:
                if self.stage[out] > MOST_PASSES:
                    raise Stays("cotangents depend on more than one sum over tokens after another")
                made = passes[self.stage[out] - 1]
                made.outputs[out] = self.flows[unit].result
                self._make([(unit, self.flows[unit])], made, self.stage[out])
            for made in passes:
                wanted.update(value for value, _ in made.inputs)
        self._sort(*passes)
        return [made for made in passes if made.outputs]

    def _sort(self, *passes: Pass) -> None:
        order = {unit: i for i, unit in enumerate(self.level.equations())}
        for made in passes:
            made.steps = dict(sorted(made.steps.items(), key=lambda item: order[item[0][0]]))

    def _has_own_matrix(self, unit: Unit, flowing: Flow) -> bool:
        """Return whether a product is none of the loss: it has another matrix."""
        if unit is self.logits.unit or not _contracts(unit) or flowing.result is None:
            return False
        wholes = [a for a, rows in zip(unit.ins, flowing.operands, strict=True) if rows is None]
        if self.is_inside:
            return bool(wholes)
        matrix = source(self.level, self.logits.unit.ins[1 - self.logits.side])
        return any(source(self.level, a) != matrix for a in wholes)

    def _make(self, pending: list[tuple[Unit, Flow]], into: Pass, stage: int) -> None:
        """Add to a pass equations, and what their results are made of."""
        while pending:
            unit, flowing = pending.pop()
            if (unit, flowing) in into.steps:
                continue
            turned = [self._turned(unit, atom) for atom in unit.ins]
            atoms = [a if t is None else t for a, t in zip(unit.ins, turned, strict=True)]
            rule = self.rules.get(unit)
            reads = rule.forward.reads if rule else enumerate(flowing.operands)
            places = [(atoms[i], rows) for i, rows in reads]
            keys = [(a, rows) if isinstance(a, int) else a for a, rows in places]
            if self._has_own_matrix(unit, flowing):
                raise Stays("its softmax is read by another product")
            turns = [t is not None for t in turned]
            step = Step(unit, flowing, tuple(keys), self.places(unit), turns, rule)
            into.steps[unit, flowing] = step
            for key in keys:
                if not isinstance(key, Literal):
                    self._need(key, pending, into, stage)

    def _need(self, key: Key, pending: list[tuple[Unit, Flow]], into: Pass, stage: int) -> None:
        """Add to what is pending what makes a value, or the value to what a pass reads."""
        found = self._maker(*key, stage)
        if found is None:
            into.inputs[key] = None
        else:
            pending.append(found)

    def _turned(self, unit: Unit, atom: Atom) -> Atom | None:
        """Return the matrix that a product reads transposed; its gradient lies as it does then."""
        maker = self.level.makers.get(atom) if isinstance(atom, int) else None
        if maker is None or atom in self.stage or maker.eqn.primitive.name != "transpose":
            return None
        is_matrix = _contracts(unit) and len(maker.eqn.params["permutation"]) == 2
        return maker.ins[0] if is_matrix else None

    def _maker(self, value: int, rows: Rows | None, stage: int) -> tuple[Unit, Flow] | None:
        """Return what makes a value token by token; ``None`` where it is read from the program."""
        unit, is_big = self.level.makers.get(value), self.is_big(value, rows)
        if unit is not None and value in (self.sums if rows is None else self.rows):
            return (unit, self.flows[unit]) if is_big or self.stage[value] == stage else None
        if unit is None if self.is_inside else not is_big:
            return None
        if unit is not None and not unit.eqn.effects and not _contracts(unit):
            found = Flow((None,) * len(unit.ins), None)
            if rows is not None:
                found = flow(unit.eqn, (), self.places(unit), rows)
            if found is not None and (rows is not None or value not in self.stage):
                return unit, found
        raise Stays("logits meet an array of their size")
