"""Which equations of a program have results that somebody needs; the compiler drops the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxamp.core import jax_compat, taxonomy
from jaxamp.core.taxonomy import Trait
from jaxamp.jaxprs import nested as wiring

Needs = tuple[bool, ...]


class Live:
    """Looks backward through jaxprs, nested ones included; each is looked at once."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, Needs], tuple[Needs, Needs]] = {}
        self._wanted: dict[tuple[int, Needs], set[Any]] = {}

    def equations(self, jaxpr: Jaxpr, needed: Sequence[bool]) -> Needs:
        """Whether each equation is needed, given which results of the jaxpr are."""
        return self._look(jaxpr, tuple(needed))[0]

    def wanted(self, jaxpr: Jaxpr, needed: Sequence[bool]) -> set[Any]:
        """The variables that somebody needs."""
        self._look(jaxpr, tuple(needed))
        return self._wanted[id(jaxpr), tuple(needed)]

    def results(self, eqn: JaxprEqn, needed: Sequence[bool]) -> list[bool]:
        """Which results of the jaxprs inside an equation are needed, given which of its own are."""
        trait = _trait(eqn)
        if "length" in eqn.params:
            return self._scan(eqn, needed)[0]
        transparent = trait in (Trait.CALL, Trait.MANUAL, Trait.BRANCH)
        return list(needed) if transparent else []

    def _look(self, jaxpr: Jaxpr, needed: Needs) -> tuple[Needs, Needs]:
        key = id(jaxpr), needed
        if key not in self._found:
            wanted = {v for v, n in zip(jaxpr.outvars, needed, strict=True) if n and _is_var(v)}
            live = [self._visit(eqn, wanted) for eqn in reversed(jaxpr.eqns)]
            ins = tuple(v in wanted for v in jaxpr.invars)
            self._found[key] = tuple(reversed(live)), ins
            self._wanted[key] = wanted
        return self._found[key]

    def _visit(self, eqn: JaxprEqn, wanted: set[Any]) -> bool:
        needed = [v in wanted for v in eqn.outvars]
        if not (any(needed) or eqn.effects):
            return False
        reads = self._operands(eqn, needed)
        pairs = zip(eqn.invars, reads, strict=True)
        wanted.update(v for v, is_read in pairs if is_read and _is_var(v))
        return True

    def _operands(self, eqn: JaxprEqn, needed: Sequence[bool]) -> Sequence[bool]:
        everything = [True] * len(eqn.invars)
        trait = _trait(eqn)
        if eqn.effects:
            return everything
        if "length" in eqn.params:
            return self._scan(eqn, needed)[1]
        if trait is Trait.BRANCH:
            each = [self._look(b.jaxpr, tuple(needed))[1] for b in wiring.branches(eqn)]
            return [True, *map(any, zip(*each, strict=True))]
        if trait in (Trait.CALL, Trait.MANUAL):
            reads = self._look(wiring.call_body(eqn).jaxpr, tuple(needed))[1]
            return reads if len(reads) == len(everything) else everything
        return everything

    def _scan(self, eqn: JaxprEqn, needed: Sequence[bool]) -> tuple[list[bool], Sequence[bool]]:
        """A carry that the next iteration needs is needed."""
        consts, carries = jax_compat.scan_layout(eqn)
        results = list(needed)
        while True:
            reads = self._look(wiring.loop(eqn).body.jaxpr, tuple(results))[1]
            again = [
                a or b for a, b in zip(results, reads[consts : consts + carries], strict=False)
            ]
            again += results[carries:]
            if again == results:
                return results, reads
            results = again


def _trait(eqn: JaxprEqn) -> Trait | None:
    op = taxonomy.lookup(eqn.primitive)
    return op.trait if op else None


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, Literal)
