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
from jax.extend.core import JaxprEqn, Literal

from jaxamp.found.cross_entropy.rows import Flow, Rows, flow, flow_back
from jaxamp.found.levels import Atom, Level, Unit, numbers
from jaxamp.jaxprs.known_arrays import KnownArrays
from jaxamp.jaxprs.nested import RULED, nested

MOST_PASSES = 2
_EXPONENTIALS = ("exp", "exp2")
MOVES = ("transpose", "convert_element_type", "reshape", "squeeze", "copy", "pvary",
         "stop_gradient", "name")  # fmt: skip

Key = tuple[int, Rows | None]
"""A value of the program, and where its tokens are; all of it for ``None``."""


class Step(NamedTuple):
    """An equation that is computed for some tokens at a time.

    Attributes:
      unit: the equation.
      flow: how tokens go through it.
      operands: the values that it reads.
      places: of a lookup, per number of an index the axis of the indices that it counts.
      turned: of a product, which operands the program transposes before.
    """

    unit: Unit
    flow: Flow
    operands: tuple[Key | Literal, ...]
    places: Sequence[int | None]
    turned: Sequence[bool]


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
    def caps(self) -> int:
        """The number of equations as of a soft cap."""
        return sum(step.unit.eqn.primitive.name == "tanh" for step in self.steps.values())


class Logits(NamedTuple):
    """A product of activations and a matrix, or several, of which an axis counts tokens.

    Attributes:
      unit: the product.
      rows: where its tokens are.
      side: which operand has them.
      width: the number of products that a logit is a sum of.
      heads: the number of matrices that are multiplied at once.
    """

    unit: Unit
    rows: Rows
    side: int
    width: int
    heads: int

    @property
    def matrix(self) -> Any:
        """The type of the matrix."""
        return self.unit.eqn.invars[1 - self.side].aval

    @property
    def words(self) -> int:
        """The number of logits of each token."""
        return self.matrix.size // (self.width * self.heads)

    def multiplies_given(self, level: Level) -> bool:
        """Return whether the matrix is given to a level, and the activations are made there.

        That tells several heads from the scores of attention, and words from tokens.
        """
        made = [source(level, atom) in level.makers for atom in self.unit.ins]
        return made[self.side] and not made[1 - self.side]


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
    found = [
        Logits(unit, Rows(axis, 1, 1, 0, n), int(axis >= first), width, heads)
        for axis, n in enumerate(out)
        if n > 1 and axis >= len(batch)
    ]
    found = [logits for logits in found if not batch or logits.multiplies_given(level)]
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
      rows: per value that depends on it and is computed token by token, where its tokens are.
      stage: per value that depends on it, the pass in which it is made, or after which.
      flows: how tokens go through equations.
      sums: sums over tokens that are part of a pass.
    """

    level: Level
    known: KnownArrays
    logits: Logits
    taken: frozenset[int]
    rows: dict[int, Rows] = field(default_factory=dict)
    stage: dict[int, int] = field(default_factory=dict)
    flows: dict[Unit, Flow] = field(default_factory=dict)
    sums: set[int] = field(default_factory=set)
    is_softmax: bool = False
    _wide: set[int] = field(default_factory=set)  # values of the size of the logits, made of them
    _powers: set[int] = field(default_factory=set)  # values that exponentials of logits are in

    def passes(self) -> list[Pass]:
        """Return what is computed in each pass; none without a softmax of each token's logits.

        What is added up of losses and other small numbers is part of a pass, if it can be: XLA
        reads logits once for that and their cotangents.
        """
        self._follow()
        return self._read() if self.is_softmax else []

    def is_big(self, value: int, rows: Rows | None) -> bool:
        """Return whether a value that is computed token by token has the size of the logits."""
        avals = self.level.avals
        return rows is not None and 2 * avals[value].size >= avals[self._product].size

    @property
    def _product(self) -> int:
        (out,) = numbers(self.logits.unit.outs)
        return out

    def _follow(self) -> None:
        """Follow the tokens from the product on."""
        for unit in self.level.equations():
            if unit is self.logits.unit:
                self.rows[self._product], self.stage[self._product] = self.logits.rows, 1
                self._wide.add(self._product)
                labelled = flow_back(unit.eqn, self.logits.rows)
                assert labelled is not None
                self.flows[unit] = labelled
            elif tainted := [a for a in numbers(unit.ins) if a in self.stage]:
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
                raise Stays("its softmax has a custom derivative: amp(grad(f)) reads it")
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
        return heads == 1 or (heads > 1 and self.logits.multiplies_given(self.level))

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
        own = [a in tainted for a in unit.ins]
        match name:
            case "mul":
                return sum(own) == 1
            case "div":
                return own == [True, False]
            case "add" | "sub" | "add_any":
                return all(own)
        return name in (*MOVES, "neg")

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
                self._make(out, made, self.stage[out])
            for made in passes:
                wanted.update(value for value, _ in made.inputs)
        order = {unit: i for i, unit in enumerate(self.level.equations())}
        for made in passes:
            made.steps = dict(sorted(made.steps.items(), key=lambda item: order[item[0][0]]))
        return [made for made in passes if made.outputs]

    def _has_own_matrix(self, unit: Unit, flowing: Flow) -> bool:
        """Return whether a product is none of the loss: it has another matrix."""
        if unit is self.logits.unit or not _contracts(unit) or flowing.result is None:
            return False
        wholes = [a for a, rows in zip(unit.ins, flowing.operands, strict=True) if rows is None]
        matrix = source(self.level, self.logits.unit.ins[1 - self.logits.side])
        return any(source(self.level, a) != matrix for a in wholes)

    def _make(self, value: int, into: Pass, stage: int) -> None:
        """Add to a pass what a value is made of."""
        maker = self.level.makers[value]
        pending: list[tuple[Unit, Flow]] = [(maker, self.flows[maker])]
        while pending:
            unit, flowing = pending.pop()
            if (unit, flowing) in into.steps:
                continue
            turned = [self._turned(unit, atom) for atom in unit.ins]
            atoms = [a if t is None else t for a, t in zip(unit.ins, turned, strict=True)]
            keys = [
                (atom, rows) if isinstance(atom, int) else atom
                for atom, rows in zip(atoms, flowing.operands, strict=True)
            ]
            if self._has_own_matrix(unit, flowing):
                raise Stays("its softmax is read by another product")
            into.steps[unit, flowing] = Step(
                unit, flowing, tuple(keys), self.places(unit), [t is not None for t in turned]
            )
            for key in keys:
                if isinstance(key, Literal):
                    continue
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
        if value in (self.sums if rows is None else self.rows):
            assert unit is not None
            return (unit, self.flows[unit]) if is_big or self.stage[value] == stage else None
        if rows is None or not is_big:
            return None
        if unit is not None and not unit.eqn.effects and not _contracts(unit):
            found = flow_back(unit.eqn, rows, self.places(unit))
            if found is not None:
                return unit, found
        raise Stays("logits meet an array of their size")
