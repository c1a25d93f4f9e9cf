"""Run a program operation by operation, and remember what made each value that is not finite.

An operation whose result holds an infinity or a NaN is to blame for it, unless an operand holds one
of the same kind already: then what made that is. A NaN made of an infinity is blamed on what made
the infinity. Of several to blame, the earliest counts.

A loop is compiled and run whole; only one that gives a number that is not finite is gone through
step by step, and of its steps only those that do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import Trait, op_of
from jaxamp.inspect.blocks import Block, Site
from jaxamp.jaxprs.nested import loop, nested
from jaxamp.numerics.nested_interpreter import is_inexact, run_live, tested
from jaxamp.numerics.statistics import peak_of
from jaxamp.rewrite.environment import Environment
from jaxamp.rewrite.interpreter import emit, rule_context
from jaxamp.rewrite.registry import RewriteContext

INFINITY, NAN = "infinity", "NaN"
_peak = jax.jit(peak_of)


class Mark(NamedTuple):
    """The worst that a value holds which is not finite, and the operation to blame, if any.

    Of that it has the time at which it ran, what it made, the iteration of each loop around it, and
    what it took, before that was cast for it.
    """

    kind: str
    time: float = math.inf
    site: Site | None = None
    born: str = ""
    iterations: tuple[int, ...] = ()
    operands: tuple[Any, ...] = ()


class Marked(NamedTuple):
    """A value, and its mark; ``None`` if it is finite."""

    array: Any
    mark: Mark | None = None


def kind_of(array: Any) -> str:
    """Return ``"NaN"`` or ``"infinity"``, the worst that an array holds; empty if all is finite."""
    if not is_inexact(jax.typeof(array)):
        return ""
    peak = float(_peak(array))
    return NAN if math.isnan(peak) else INFINITY if math.isinf(peak) else ""


def earliest(marks: Iterable[Mark]) -> Mark:
    """Return the mark of the operation that ran first."""
    return min(marks, key=lambda mark: mark.time)


class Blaming:
    """Runs blocks operation by operation; without a context, as they are written."""

    def __init__(self, context: RewriteContext | None) -> None:
        self.context, self.time = context, 0

    def run(self, block: Block, values: Sequence[Marked], loops: tuple[int, ...]) -> list[Marked]:
        """Return the results of a block, given which iteration it is of each loop around."""
        run = _Run(self, block, loops)
        run.enter(block.jaxpr.constvars, list(map(given, block.consts)))
        run.enter(block.jaxpr.invars, values)
        run_live(block, run.equation)
        return run.results()

    def blamed(
        self, site: Site, kind: str, taken: Sequence[Mark], loops: tuple[int, ...], operands: Any
    ) -> Mark:
        """Return the mark of what an operation made of operands with these marks."""
        same = [mark for mark in taken if mark.kind == kind]
        if kind == NAN and not same:
            same = [mark for mark in taken if mark.site is not None]
        if same:
            return earliest(same)._replace(kind=kind)
        self.time += 1
        return Mark(kind, self.time, site, kind, loops, tuple(operands))


class _Run:
    """The run of one block."""

    def __init__(self, owner: Blaming, block: Block, loops: tuple[int, ...]) -> None:
        self.owner, self.block, self.loops = owner, block, loops
        self.env = Environment()
        self.marks: dict[Any, Mark | None] = {}
        reads = [
            eqn.invars if live else []
            for eqn, live in zip(block.jaxpr.eqns, block.live, strict=True)
        ]
        atoms = enumerate([*reads, block.jaxpr.outvars])
        self.last_read = {a: at for at, read in atoms for a in read if not isinstance(a, Literal)}

    def enter(self, variables: Sequence[Any], values: Sequence[Marked]) -> None:
        """Bind values as they arrive."""
        self.env.enter(variables, [value.array for value in values])
        self.marks.update(zip(variables, [value.mark for value in values], strict=True))

    def equation(self, position: int) -> None:
        """Run one equation, and drop what was read for the last time."""
        self._run(position)
        read = {a for a in self.block.jaxpr.eqns[position].invars if not isinstance(a, Literal)}
        self.env.forget({var for var in read if self.last_read[var] == position})

    def _run(self, position: int) -> None:
        eqn, decision = self.block.jaxpr.eqns[position], self.block.decision(position)
        stored = [self._read(atom) for atom in eqn.invars]
        taken = stored
        if decision is not None:
            operands = map(self.env.read_operand, eqn.invars, decision.reads)
            taken = [Marked(o, value.mark) for o, value in zip(operands, stored, strict=True)]
        site = self.block.sites[position]
        outputs = decision.outputs if decision else [None] * len(eqn.outvars)
        if site is None:
            results = self._nested(position, taken)
            self.env.write(eqn.outvars, [r.array for r in results], outputs)
            self.marks.update(zip(eqn.outvars, [r.mark for r in results], strict=True))
            return
        made = self._emitted(position, [value.array for value in taken])
        self.env.write(eqn.outvars, made, outputs)
        self._judge(site, stored, taken)

    def results(self) -> list[Marked]:
        """Return the results of the block."""
        atoms = self.block.jaxpr.outvars
        arrays = self.env.read_results(atoms, self.block.outputs)
        return [Marked(a, self._read(atom).mark) for a, atom in zip(arrays, atoms, strict=True)]

    def _read(self, atom: Any) -> Marked:
        array = self.env.read(atom, None)
        return given(array) if isinstance(atom, Literal) else Marked(array, self.marks[atom])

    def _emitted(self, position: int, operands: Sequence[Any]) -> Sequence[Any]:
        eqn, decision = self.block.jaxpr.eqns[position], self.block.decision(position)
        if decision is not None and self.owner.context is not None:
            context = rule_context(self.owner.context, eqn, decision, self.env)
            return emit(context, operands).results
        if nested(eqn) and not eqn.effects:  # not all of these can be run uncompiled
            return jax.jit(lambda *operands: jax_compat.bind(eqn, operands))(*operands)
        return jax_compat.bind(eqn, operands)

    def _judge(self, site: Site, stored: Sequence[Marked], taken: Sequence[Marked]) -> None:
        """Mark the results of an operation, and the mutable arrays that it writes to."""
        eqn, operands = site.eqn, [value.array for value in stored]

        def blamed(kind: str, marks: Sequence[Mark]) -> Mark | None:
            return self.owner.blamed(site, kind, marks, self.loops, operands) if kind else None

        def mark_of(before: Marked, after: Marked) -> Mark | None:
            """Return the mark of an operand; a cast that is made for an operation may overflow."""
            if before.array is after.array:
                return before.mark
            return blamed(kind_of(after.array), [before.mark] if before.mark else [])

        marks = [mark for mark in map(mark_of, stored, taken) if mark]
        written = eqn.invars if jax_compat.writes_to_ref(eqn) else ()
        for atom in (*eqn.outvars, *filter(_is_cell, written)):
            if not isinstance(atom, jax_compat.DropVar):
                array = self.env.read(atom, None)
                self.marks[atom] = blamed(kind_of(array[...] if _is_cell(atom) else array), marks)

    def _nested(self, position: int, values: Sequence[Marked]) -> Sequence[Marked]:
        """Return the results of an equation that holds blocks."""
        eqn, inner = self.block.jaxpr.eqns[position], self.block.inner[position]
        trait = op_of(eqn.primitive).trait
        if trait is Trait.BRANCH:
            taken = inner[np.clip(int(values[0].array), 0, len(inner) - 1)]
            return self.owner.run(taken, values[1:], self.loops)
        if trait is Trait.CALL:
            return self.owner.run(inner[0], values, self.loops)
        if not eqn.effects:
            whole = self._emitted(position, [value.array for value in values])
            if not any(map(kind_of, whole)) or eqn.params.get("length") == 0:
                return list(map(Marked, whole))
        go = self._while if position in self.block.test else self._scan
        return go(position, values)

    def _scan(self, position: int, values: Sequence[Marked]) -> Sequence[Marked]:
        eqn = self.block.jaxpr.eqns[position]
        _, invariants, carry, whole = loop(eqn).parts(values)
        step, made = self._step(position), []
        direction = -1 if eqn.params["reverse"] else 1
        for done, at in enumerate(range(eqn.params["length"])[::direction]):
            outs = step([*invariants, *carry, *(_slice(value, at) for value in whole)], done)
            carry, slices = outs[: len(carry)], outs[len(carry) :]
            made.append(slices)
        return [*carry, *map(_stack, zip(*made[::direction], strict=True))]

    def _while(self, position: int, values: Sequence[Marked]) -> Sequence[Marked]:
        constants, invariants, carry, _ = loop(self.block.jaxpr.eqns[position]).parts(values)
        test, context = self.block.test[position], self.owner.context
        goes_on = jax.jit(lambda arrays: tested(context, *test, arrays))
        step, done = self._step(position), 0
        while goes_on([value.array for value in (*constants, *carry)]):
            carry = step([*invariants, *carry], done)
            done += 1
        return carry

    def _step(self, position: int) -> Callable[[Sequence[Marked], int], Sequence[Marked]]:
        """Return what runs one step of a loop: at once, and by operation if that is not finite."""
        eqn, (body,) = self.block.jaxpr.eqns[position], self.block.inner[position]
        is_plain = not (eqn.effects or body.is_low)
        compiled = jax.jit(jaxpr_as_fun(ClosedJaxpr(body.jaxpr, body.consts)))

        def step(values: Sequence[Marked], done: int) -> Sequence[Marked]:
            if is_plain:
                whole = compiled(*(value.array for value in values))
                if not any(map(kind_of, whole)):
                    return list(map(Marked, whole))
            return self.owner.run(body, values, (*self.loops, done))

        return step


def given(array: Any) -> Marked:
    """Return an input or a constant."""
    kind = kind_of(array)
    return Marked(array, Mark(kind, born=kind) if kind else None)


def _slice(value: Marked, index: int) -> Marked:
    """Return a slice, which may be finite where the whole is not."""
    part = lax.index_in_dim(value.array, index, keepdims=False)
    kind = kind_of(part) if value.mark else ""
    return Marked(part, value.mark._replace(kind=kind) if value.mark and kind else None)


def _stack(slices: Sequence[Marked]) -> Marked:
    """Return slices as one array; the worst of them counts, and of these the earliest."""
    marks = [value.mark for value in slices if value.mark]
    worst = [mark for mark in marks if mark.kind == NAN] or marks
    return Marked(jnp.stack([v.array for v in slices]), earliest(worst) if worst else None)


def _is_cell(atom: Any) -> bool:
    """Return whether a variable is a mutable array."""
    return jax_compat.is_ref(atom.aval)
