"""Softmaxes in a function of their own, apart from the products around it, which no level shows.

Such is one under a `jax.checkpoint` that the second product is not in, or with a derivative rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Flag, auto

from jax.extend.core import JaxprEqn

from jaxamp.found.levels import Level, Unit, numbers
from jaxamp.jaxprs.interpret import walk
from jaxamp.jaxprs.nested import RULED, Wiring, called, wiring


class _Seen(Flag):
    """Sources that a value is computed from."""

    NOTHING = 0
    SCORES = auto()  # a product, and no exponential of it
    EXPONENTIALS = auto()
    SUM = auto()  # of exponentials


_WEIGHTS = _Seen.EXPONENTIALS | _Seen.SUM
_NOTHING = _Seen.NOTHING


def softmaxes_apart(level: Level) -> Iterator[tuple[Unit, str]]:
    """Yield calls of a level whose softmax a product outside reads, and what they are in words."""
    seen: dict[int, _Seen] = {}
    weights: dict[int, Unit] = {}  # per value: the call that its weights are from
    for unit in level.equations():
        name = unit.eqn.primitive.name
        sources = {weights[a]: None for a in numbers(unit.ins) if a in weights}
        if name == "dot_general":
            yield from ((source, _words(source)) for source in sources)
            weights = {a: source for a, source in weights.items() if source not in sources}
        elif name not in ("reduce_sum", "reduce_max"):
            weights.update((a, source) for a in numbers(unit.outs) for source in sources)
        inputs = [seen.get(a, _NOTHING) if isinstance(a, int) else _NOTHING for a in unit.ins]
        for atom, flags in zip(unit.outs, _results(unit.eqn, inputs), strict=True):
            if isinstance(atom, int):
                seen[atom] = flags & _Seen.SCORES
                if _WEIGHTS in flags and wiring(unit.eqn) is Wiring.CALL:
                    weights[atom] = unit


def _results(eqn: JaxprEqn, operands: Sequence[_Seen]) -> Sequence[_Seen]:
    """Return what the results of an equation are computed from, those of a call through it."""
    if wiring(eqn) is not Wiring.CALL:
        return [_after(eqn, operands)] * len(eqn.outvars)
    jaxpr = called(eqn).jaxpr
    consts = [_NOTHING] * len(jaxpr.constvars)
    return walk(jaxpr, consts, operands, _results, lambda literal: _NOTHING)


def _after(eqn: JaxprEqn, operands: Sequence[_Seen]) -> _Seen:
    """Return what a result is computed from."""
    flags = _Seen.NOTHING
    for operand in operands:
        flags |= operand
    match eqn.primitive.name:
        case "dot_general":
            return _Seen.SCORES
        case "exp" | "exp2" if flags:
            return flags & _Seen.SUM | _Seen.EXPONENTIALS
        case "reduce_sum" if _Seen.EXPONENTIALS in flags:
            return _Seen.SUM
    return flags if wiring(eqn) is None else _Seen.NOTHING


def _words(unit: Unit) -> str:
    if unit.eqn.primitive.name in RULED:
        return "the softmax has a derivative rule of its own"
    return "the softmax is in another function than the product with the values"
