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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jaxamp.found.cross_entropy.logits import EXPONENTIALS, MOVES, Logits, is_ruled, source
from jaxamp.found.cross_entropy.passes import End, Key, Pass, Rule, Step, contracts
from jaxamp.found.cross_entropy.rows import Flow, Rows, flow
from jaxamp.found.cross_entropy.rule_programs import programs_of
from jaxamp.found.levels import Atom, Level, Unit, known_in, numbers, open_level
from jaxamp.jaxprs.known_arrays import KnownArrays
from jaxamp.jaxprs.nested import RULED

MOST_PASSES = 2


class Stays(Exception):
    """Ends the search of a loss that stays as it is, with the reason."""


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


@dataclass(slots=True)
class Search:
    """Search of what is computed token by token, from one product."""

    level: Level  # where it is
    known: KnownArrays  # the known numbers of that
    logits: Logits  # the product
    taken: Mapping[int, Pass]  # per value that is made in chunks of another loss, the pass
    # Per value that depends on it and is computed token by token, where its tokens are; at first of
    # it alone, or of what the program of a rule is given.
    rows: dict[int, Rows]
    # Per value that depends on it, the pass in which it is made, or after which.
    stage: dict[int, int] = field(default_factory=dict)
    flows: dict[Unit, Flow] = field(default_factory=dict)  # how tokens go through equations
    # Those of them that are functions with a derivative of their own.
    rules: dict[Unit, Rule] = field(default_factory=dict)
    sums: set[int] = field(default_factory=set)  # sums over tokens that are part of a pass
    is_softmax: bool = False  # whether exponentials are added up over the words of a token
    _after: list[Unit] = field(default_factory=list)  # all that depends on the logits
    _wide: set[int] = field(default_factory=set)  # values of the size of the logits, made of them
    _through: set[int] = field(default_factory=set)  # values with a derivative along logits
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
        self.stage |= dict.fromkeys(self.rows, 1)
        self._wide.update(value for value, rows in self.rows.items() if self.is_big(value, rows))
        self._through.update(self.rows)
        after = {a for unit in self.level.made_of(self.rows) for a in numbers(unit.outs)}
        for other in {*self.taken.values()}:  # all that it makes is made of all that it reads
            if not after.isdisjoint(value for value, _ in other.inputs):
                self.stage |= dict.fromkeys(other.outputs, 1)
        self._after = self.level.made_of(self.stage)
        for unit in self._after:
            self._step(unit)

    def _step(self, unit: Unit) -> None:
        tainted, outs = [a for a in numbers(unit.ins) if a in self.stage], numbers(unit.outs)
        self.stage |= dict.fromkeys(outs, max(self.stage[a] for a in tainted))
        if self._is_sum(unit, tainted):
            self.flows[unit] = Flow((None,) * len(unit.ins), None)
            self.sums.add(outs[0])
            return
        found = self._flow(unit)
        if found is None:
            if not self._wide.isdisjoint(tainted) and is_ruled(unit.eqn):
                raise Stays("its softmax has a derivative rule that is not of each token")
            return
        after = max(self.stage[a] + (a not in self.rows) for a in tainted)
        self.stage |= dict.fromkeys(outs, after)
        self.flows[unit] = found
        if is_through := not self._through.isdisjoint(tainted):
            read = self.rules[unit].moved(outs) if unit in self.rules else outs
            self._through.update(self.level.moving.intersection(read))
        big = [a for a in tainted if a in self._wide]
        if found.result is not None:
            if contracts(unit) and None in found.operands and big:
                return  # the cotangents of activations, from which the rest of the program follows
            self.rows.update(dict.fromkeys(outs, found.result))
            self._wide.update(out for out in outs if big and self.is_big(out, found.result))
        elif big or (
            self.stage[outs[0]] == 1  # no second pass for small numbers alone
            and self.taken.keys().isdisjoint(outs)
            and not any(self.is_big(a, self.rows.get(a)) for a in tainted)
            and (is_through or self.level.moving.isdisjoint(outs))  # none along weights alone
        ):
            self.sums.update(outs)
        name = unit.eqn.primitive.name
        if (name in EXPONENTIALS and big) or not self._powers.isdisjoint(tainted):
            self._powers.update(outs)
        if name == "reduce_sum" and found.result is not None and not self._powers.isdisjoint(big):
            self.is_softmax |= self._is_over_words(big[0], outs[0])

    def _flow(self, unit: Unit) -> Flow | None:
        """Return how tokens go through an equation; ``None`` if it mixes them, or has an effect."""
        given = [self._place(a) for a in unit.ins]
        if not any(given) or unit.eqn.effects:
            return None
        if unit.eqn.primitive.name in RULED and not self._wide.isdisjoint(numbers(unit.ins)):
            try:
                found, self.rules[unit] = self._rule(unit, given)
            except Stays:
                return None
        else:
            found = flow(unit.eqn, given, self._places(unit))
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
        if name == "reduce_sum" or not _is_linear(name, [a in tainted for a in unit.ins]):
            return False
        (result,) = numbers(unit.outs)
        return not self.level.avals[result].shape and result not in self.taken

    def _places(self, unit: Unit) -> tuple[int | None, ...]:
        """Return per number of the indices of a lookup which of their axes it counts."""
        numbering = unit.eqn.params.get("dimension_numbers")
        axes = getattr(numbering, "start_index_map", None)
        axes = getattr(numbering, "scatter_dims_to_operand_dims", axes)
        if not axes or len(axes) < 2:
            return ()
        return tuple(self._counted(unit.ins[1], i) for i in range(len(axes)))

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
        ends = [(a, forward._place(a)) for a in forward.level.exits]
        (result, *others) = {rows for _, rows in ends[:count]}
        places = {i: rows for i, rows in forward._pass(ends[:count]).inputs if rows is not None}
        backward = self._inside(unit, programs[1], [rows for _, rows in ends])
        pulled = backward._pass(
            [(a, places.get(i)) for a, i in zip(backward.level.exits, moving, strict=True)]
        )
        saved = [(ends[i][0], rows) for i, rows in pulled.inputs if i >= count]
        whole = forward._pass(ends[:count], saved)
        if others or any(sum(i == j for j, _ in whole.inputs) > 1 for i in moving):
            raise Stays("a rule mixes tokens")
        is_linear = backward._is_linear(pulled, backward.level.entries[:count])
        flowing = Flow(tuple(map(places.get, range(len(unit.ins)))), result)
        return flowing, Rule(whole, pulled, moving, is_linear)

    def _inside(self, unit: Unit, closed: ClosedJaxpr, rows: Sequence[Rows | None]) -> Search:
        """Return the search of a program of a rule, given where tokens of its operands are."""
        level = open_level(closed, unit.scope, is_final=True)
        places = zip(level.entries, rows, strict=True)
        start = {value: rows for value, rows in places if rows is not None}
        search = Search(level, known_in(level, {}), self.logits, {}, start)
        search._follow()
        return search

    def _place(self, atom: Atom) -> Rows | None:
        return self.rows.get(atom) if isinstance(atom, int) else None

    def _pass(self, results: Sequence[End], saved: Sequence[End] = ()) -> Pass:
        """Return what makes results, and what a backward pass reads.

        Results of no token add up over chunks; of what is read later there is no such sum.
        """
        made, pending = Pass(exits=[*results, *saved]), list[tuple[Unit, Flow]]()
        for value, rows in made.exits:
            if isinstance(value, int):
                if value in self.stage and (self.stage[value], self.rows.get(value)) != (1, rows):
                    raise Stays("a rule mixes tokens")
                self._need((value, rows), pending, made, 1)
        self._make(pending, made, 1)
        if not self.sums.isdisjoint(numbers(a for a, _ in saved)) or not all(
            rows or self._is_zero(a) or a in [*self.sums] for a, rows in results
        ):
            raise Stays("a rule mixes tokens")
        _sort(made)
        return made

    def _is_zero(self, atom: Atom) -> bool:
        return atom in self.known and not self.known.thin(atom).any()

    def _is_linear(self, made: Pass, cotangents: Sequence[int]) -> bool:
        """Return whether all that is read of a pass is linear in cotangents."""
        moving: list[Atom] = [*cotangents]
        for step in made.steps.values():
            read = [a for a, _ in step.operands]
            if any(a in moving for a in read):
                own = [self._is_zero(a) or a in moving for a in read]
                if not _is_linear(step.unit.eqn.primitive.name, own):
                    return False
                moving += step.unit.outs
        return all(self._is_zero(a) or a in moving for a, _ in made.exits)

    # What the program reads.

    def _read(self) -> list[Pass]:
        """Return the passes that make what the rest of the program reads."""
        passes = [Pass() for _ in range(MOST_PASSES)]
        wanted = {*numbers(self.level.exits)}
        if not wanted.isdisjoint(self._wide):
            raise Stays("logits are returned")
        for unit in reversed(self._after):
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
                made.exits.append((out, self.flows[unit].result))
                self._make([(unit, self.flows[unit])], made, self.stage[out])
            for made in passes:
                wanted.update(value for value, _ in made.inputs)
        for made in passes:
            _sort(made)
        return [made for made in passes if made.exits]

    def _has_own_matrix(self, unit: Unit, flowing: Flow) -> bool:
        """Return whether a product is none of the loss: it has another matrix."""
        if unit is self.logits.unit or not contracts(unit) or flowing.result is None:
            return False
        wholes = [a for a, rows in zip(unit.ins, flowing.operands, strict=True) if rows is None]
        matrix = self.logits.unit.ins[1 - self.logits.side]  # which no rule reads
        own = None if self.level.is_final else source(self.level, matrix)
        return any(source(self.level, a) != own for a in wholes)

    def _make(self, pending: list[tuple[Unit, Flow]], into: Pass, stage: int) -> None:
        """Add to a pass equations, and what their results are made of."""
        while pending:
            unit, flowing = pending.pop()
            if (unit, flowing) in into.steps:
                continue
            if self._has_own_matrix(unit, flowing):
                raise Stays("its softmax is read by another product")
            step = into.steps[unit, flowing] = self._computed(unit, flowing)
            for value, rows in step.operands:
                if isinstance(value, int):
                    self._need((value, rows), pending, into, stage)

    def _computed(self, unit: Unit, flowing: Flow) -> Step:
        """Return an equation as it is computed for some tokens at a time."""
        rule = self.rules.get(unit)
        reads = rule.forward.inputs if rule else enumerate(flowing.operands)
        operands = [(self._lying(unit, unit.ins[i]), rows) for i, rows in reads]
        if any(rows and isinstance(a, Literal) for a, rows in operands):
            raise Stays("a rule holds an array of tokens")
        return Step(unit, flowing, operands, rule)

    def _need(self, key: Key, pending: list[tuple[Unit, Flow]], into: Pass, stage: int) -> None:
        """Add to what is pending what makes a value, or the value to what a pass reads."""
        found = self._maker(*key, stage)
        if found is None:
            into.inputs[key] = None
        else:
            pending.append(found)

    def _lying(self, unit: Unit, atom: Atom) -> Atom:
        """Return the matrix of a product that reads it transposed: so its gradient lies as it."""
        maker = self.level.makers.get(atom) if isinstance(atom, int) else None
        if maker is None or atom in self.stage or not contracts(unit):
            return atom
        return maker.ins[0] if maker.eqn.params.get("permutation") == (1, 0) else atom

    def _maker(self, value: int, rows: Rows | None, stage: int) -> tuple[Unit, Flow] | None:
        """Return what makes a value token by token; ``None`` where it is read from the program."""
        unit, is_big = self.level.makers.get(value), self.is_big(value, rows)
        if unit is not None and value in (self.sums if rows is None else self.rows):
            return (unit, self.flows[unit]) if is_big or self.stage[value] == stage else None
        if unit is None if self.level.is_final else not is_big:
            return None
        if unit is not None and not unit.eqn.effects and not contracts(unit):
            found = Flow((None,) * len(unit.ins), None)
            if rows is not None:
                found = flow(unit.eqn, (), self._places(unit), rows)
            if found is not None and (rows is not None or value not in self.stage):
                return unit, found
        raise Stays("logits meet an array of their size")


def _sort(made: Pass) -> None:
    """Put the equations of a pass in the program's order, in which values are numbered."""
    made.steps = dict(sorted(made.steps.items(), key=lambda item: min(numbers(item[0][0].outs))))
