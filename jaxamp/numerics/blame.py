"""Run a program operation by operation, and remember what made each value that is not finite.

An operation whose result holds an infinity or a NaN is to blame for it, unless an operand holds one
of the same kind already: then what made that is. A NaN made of an infinity is blamed on what made
the infinity. Of several to blame, the earliest counts. A cast that ``amp`` has put around an
operation is part of that operation.

A loop is compiled and run whole; only one that gives a number that is not finite is gone through
step by step, and of its steps only those that do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.extend.core.primitives import convert_element_type_p

from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import Trait, op_of
from jaxamp.inspect.dce import live_equations
from jaxamp.jaxprs.name_stack import joined_scope
from jaxamp.jaxprs.nested import loop, nested
from jaxamp.numerics.nested_interpreter import is_inexact
from jaxamp.numerics.statistics import peak_of

INFINITY, NAN = "infinity", "NaN"
_peak = jax.jit(peak_of)


class Mark(NamedTuple):
    """The worst that a value holds which is not finite, and the operation to blame, if any.

    Of that it has the time at which it ran, its equation and name stack, the dtype that it computed
    in, what it made, the iteration of each loop around it, and what it took, before that was cast.
    """

    kind: str
    time: float = math.inf
    eqn: JaxprEqn | None = None
    name_stack: str = ""
    dtype: str = ""
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


def marked_results(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Marked]:
    """Run a program, and return its results with their marks."""
    return _Run(closed, "", (), itertools.count()).of(list(map(_given, args)))


class _Run:
    """The run of one jaxpr, inside of a name stack and an iteration of each loop around it."""

    def __init__(
        self, closed: ClosedJaxpr, name_stack: str, loops: tuple[int, ...], clock: Iterator[int]
    ) -> None:
        self.jaxpr, self.consts = closed.jaxpr, closed.consts
        self.name_stack, self.loops, self.clock = name_stack, loops, clock
        self.env: dict[Any, Marked] = {}
        self.latest: tuple[JaxprEqn | None, list[Any]] = None, []  # and what it took

    def of(self, values: Sequence[Marked]) -> list[Marked]:
        """Return the results for some inputs; each value is dropped when it was read."""
        jaxpr = self.jaxpr
        eqns = list(itertools.compress(jaxpr.eqns, live_equations(jaxpr)))
        reads = enumerate([*(eqn.invars for eqn in eqns), jaxpr.outvars])
        last_read = {a: at for at, atoms in reads for a in atoms if not isinstance(a, Literal)}
        self.env.update(zip(jaxpr.constvars, map(_given, self.consts), strict=True))
        self.env.update(zip(jaxpr.invars, values, strict=True))
        for at, eqn in enumerate(eqns):
            with jax_compat.emitting(eqn):
                self.env.update(zip(eqn.outvars, self._equation(eqn), strict=True))
            for var in (*eqn.invars, *eqn.outvars):
                if not isinstance(var, Literal) and last_read.get(var, at) == at:
                    self.env.pop(var, None)
        return self._read(jaxpr.outvars)

    def _read(self, atoms: Sequence[Any]) -> list[Marked]:
        return [
            _given(jax_compat.literal_value(a)) if isinstance(a, Literal) else self.env[a]
            for a in atoms
        ]

    def _equation(self, eqn: JaxprEqn) -> Sequence[Marked]:
        values, bodies = self._read(eqn.invars), nested(eqn)
        trait = op_of(eqn.primitive).trait
        if trait is Trait.BRANCH:
            taken = bodies[np.clip(int(values[0].array), 0, len(bodies) - 1)]
            return self._inside(eqn, taken, self.loops).of(values[1:])
        if trait is Trait.CALL and bodies:
            return self._inside(eqn, bodies[0], self.loops).of(values)
        if trait is Trait.LOOP:
            return self._loop(eqn, values)
        return self._computed(eqn, values)

    def _inside(self, eqn: JaxprEqn, body: ClosedJaxpr, loops: tuple[int, ...]) -> _Run:
        return _Run(body, joined_scope(self.name_stack, eqn), loops, self.clock)

    def _computed(self, eqn: JaxprEqn, values: Sequence[Marked]) -> list[Marked]:
        """Return the results of an operation, and mark the mutable arrays that it writes to."""
        results = _bound(eqn, values)
        for atom in eqn.invars if jax_compat.writes_to_ref(eqn) else ():
            if jax_compat.is_ref(atom.aval):
                cell = self.env[atom].array
                self.env[atom] = Marked(cell, self._blamed(eqn, kind_of(cell[...]), values))
        marked = [Marked(r, self._blamed(eqn, kind_of(r), values)) for r in results]
        if eqn.primitive is not convert_element_type_p:
            self.latest = eqn, _arrays(values)
        return marked

    def _blamed(self, eqn: JaxprEqn, kind: str, values: Sequence[Marked]) -> Mark | None:
        """Return the mark of what an equation has made of values."""
        if not kind:
            return None
        marks = [value.mark for value in values if value.mark]
        same = [mark for mark in marks if mark.kind == kind]
        if kind == NAN and not same:
            same = [mark for mark in marks if mark.eqn is not None]
        if same:
            return earliest(same)._replace(kind=kind)
        operation, operands = self._operation(eqn, values)
        return Mark(
            kind=kind,
            time=next(self.clock),
            eqn=operation,
            name_stack=joined_scope(self.name_stack, operation),
            dtype=_dtype(eqn),
            born=kind,
            iterations=self.loops,
            operands=tuple(operands),
        )

    def _operation(self, eqn: JaxprEqn, values: Sequence[Marked]) -> tuple[JaxprEqn, list[Any]]:
        """Return the operation that an equation is, or is a cast for, and what that took.

        A cast that ``amp`` has made has the call stack of an operation. It is for what reads it
        there, or of what made its operand.
        """
        if eqn.primitive is not convert_element_type_p:
            return eqn, _arrays(values)
        (given,), (made,) = eqn.invars, eqn.outvars
        own = [other for other in self.jaxpr.eqns if _is_operation_at(eqn, other)]
        makers = [other for other in self.jaxpr.eqns if own and given in other.outvars]
        latest, taken = self.latest
        if latest and latest in own and latest in makers:
            return latest, taken
        readers = [other for other in own if made in other.invars]
        return next(iter([*readers, *makers]), eqn), _arrays(values)

    def _loop(self, eqn: JaxprEqn, values: Sequence[Marked]) -> Sequence[Marked]:
        if not eqn.effects:
            whole = _bound(eqn, values)
            if not any(map(kind_of, whole)) or eqn.params.get("length") == 0:
                return list(map(Marked, whole))
        return self._scan(eqn, values) if loop(eqn).test is None else self._while(eqn, values)

    def _scan(self, eqn: JaxprEqn, values: Sequence[Marked]) -> Sequence[Marked]:
        _, invariants, carry, whole = loop(eqn).parts(values)
        step, made = self._step(eqn), []
        direction = -1 if eqn.params["reverse"] else 1
        for done, at in enumerate(range(eqn.params["length"])[::direction]):
            outs = step([*invariants, *carry, *(_slice(value, at) for value in whole)], done)
            carry, slices = outs[: len(carry)], outs[len(carry) :]
            made.append(slices)
        return [*carry, *map(_stack, zip(*made[::direction], strict=True))]

    def _while(self, eqn: JaxprEqn, values: Sequence[Marked]) -> Sequence[Marked]:
        wired = loop(eqn)
        constants, invariants, carry, _ = wired.parts(values)
        goes_on = jax.jit(jaxpr_as_fun(wired.test))
        step, done = self._step(eqn), 0
        while goes_on(*_arrays((*constants, *carry)))[0]:
            carry = step([*invariants, *carry], done)
            done += 1
        return carry

    def _step(self, eqn: JaxprEqn) -> Callable[[Sequence[Marked], int], Sequence[Marked]]:
        """Return what runs one step of a loop: at once, and by operation if that is not finite."""
        body = loop(eqn).body
        compiled = jax.jit(jaxpr_as_fun(body))

        def step(values: Sequence[Marked], done: int) -> Sequence[Marked]:
            if not eqn.effects:
                whole = compiled(*_arrays(values))
                if not any(map(kind_of, whole)):
                    return list(map(Marked, whole))
            return self._inside(eqn, body, (*self.loops, done)).of(values)

        return step


def _is_operation_at(eqn: JaxprEqn, other: JaxprEqn) -> bool:
    """Return whether another equation has the call stack of one, and is no cast or barrier."""
    is_beside = op_of(other.primitive).trait in (Trait.CONVERT, Trait.SAME) or nested(other)
    return other.source_info.traceback is eqn.source_info.traceback and not is_beside


def _dtype(eqn: JaxprEqn) -> str:
    """Return the narrowest dtype among the floats that an equation makes and takes."""
    avals: list[Any] = [atom.aval for atom in (*eqn.outvars, *eqn.invars)]
    dtypes = [aval.dtype for aval in avals if is_inexact(aval)]
    return str(min(dtypes, key=lambda dtype: dtype.itemsize, default=""))


def _bound(eqn: JaxprEqn, values: Sequence[Marked]) -> list[Any]:
    if nested(eqn) and not eqn.effects:  # not all of these can be run uncompiled
        return jax.jit(lambda *operands: jax_compat.bind(eqn, operands))(*_arrays(values))
    return jax_compat.bind(eqn, _arrays(values))


def _arrays(values: Sequence[Marked]) -> list[Any]:
    return [value.array for value in values]


def _given(array: Any) -> Marked:
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
