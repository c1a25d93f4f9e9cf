"""Find which equations of a program are needed; compilers drop the others (dead code)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxamp.jaxprs.nested import Wiring, called, loop, nested, wiring

Needs = tuple[bool, ...]
Reads = Callable[[JaxprEqn, Sequence[bool]], Sequence[bool]]


def live_equations(jaxpr: Jaxpr) -> list[bool]:
    """Return which equations lead to a result of the jaxpr or have an effect.

    Calls, loops and branches are taken to need all of their operands.
    """
    return _sweep(jaxpr, [True] * len(jaxpr.outvars), lambda eqn, _: [True] * len(eqn.invars))[0]


class Live:
    """Liveness through nested jaxprs; each jaxpr is swept once for each set of needed results."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, Needs], tuple[list[bool], set[Any]]] = {}

    def walk(
        self, jaxpr: Jaxpr, needed: Sequence[bool]
    ) -> Iterator[tuple[JaxprEqn, bool, Sequence[bool]]]:
        """Yield each equation, whether it is needed, and which results of its own jaxprs are."""
        live, wanted = self._look(jaxpr, needed or [True] * len(jaxpr.outvars))
        for eqn, is_live in zip(jaxpr.eqns, live, strict=True):
            yield eqn, is_live, self._inside(eqn, [var in wanted for var in eqn.outvars])[0]

    def _inside(
        self, eqn: JaxprEqn, needed: Sequence[bool]
    ) -> tuple[Sequence[bool], Sequence[bool]]:
        """Return which results of the jaxprs inside are needed, or none for all; and operands."""
        results, reads = needed, [True] * len(eqn.invars)
        match wiring(eqn):
            case Wiring.SCAN:
                results, reads = self._scan(eqn, needed)
            case Wiring.BRANCHES:
                each = [self._inputs(branch.jaxpr, needed) for branch in nested(eqn)]
                reads = [True, *map(any, zip(*each, strict=True))]
            case Wiring.CALL:
                reads = self._inputs(called(eqn).jaxpr, needed)
            case _:
                results = ()
        return results, [True] * len(eqn.invars) if eqn.effects else reads

    def _look(self, jaxpr: Jaxpr, needed: Sequence[bool]) -> tuple[list[bool], set[Any]]:
        key = id(jaxpr), tuple(needed)
        if key not in self._found:
            self._found[key] = _sweep(jaxpr, needed, lambda *each: self._inside(*each)[1])
        return self._found[key]

    def _inputs(self, jaxpr: Jaxpr, needed: Sequence[bool]) -> list[bool]:
        _, wanted = self._look(jaxpr, needed)
        return [var in wanted for var in jaxpr.invars]

    def _scan(self, eqn: JaxprEqn, needed: Sequence[bool]) -> tuple[list[bool], Sequence[bool]]:
        """Return needed results and operands: a carry that the next iteration needs is needed."""
        wired, results = loop(eqn), list(needed)
        while True:
            reads = self._inputs(wired.body.jaxpr, results)
            _, _, carries, _ = wired.parts(reads)
            again = [*map(any, zip(results, carries, strict=False)), *results[wired.carries :]]
            if again == results:
                return results, reads
            results = again


def _sweep(jaxpr: Jaxpr, needed: Sequence[bool], reads: Reads) -> tuple[list[bool], set[Any]]:
    """Go backward through a jaxpr: which equations, and which variables, are needed."""
    wanted: set[Any] = set()

    def want(atoms: Sequence[Any], flags: Sequence[bool]) -> None:
        pairs = zip(atoms, flags, strict=True)
        wanted.update(a for a, flag in pairs if flag and not isinstance(a, Literal))

    want(jaxpr.outvars, needed)
    live = []
    for eqn in reversed(jaxpr.eqns):
        results = [var in wanted for var in eqn.outvars]
        live.append(bool(eqn.effects) or any(results))
        if live[-1]:
            want(eqn.invars, reads(eqn, results))
    return live[::-1], wanted
