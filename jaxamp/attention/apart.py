"""Softmaxes in a function of their own, apart from the products around it, which no level shows.

Such is one under a `jax.checkpoint` that the second product is not in, or with a derivative rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Flag, auto

from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxamp.attention.levels import Level, Unit, numbers
from jaxamp.attention.softmaxes import Softmaxes
from jaxamp.jaxprs.interpret import walk
from jaxamp.jaxprs.nested import RULED, Wiring, called, wiring


class _Seen(Flag):
    """Sources that a value is computed from."""

    NOTHING = 0
    SCORES = auto()  # a product, and no exponential of it
    EXPONENTIALS = auto()
    SUM = auto()  # of exponentials


_WEIGHTS = _Seen.EXPONENTIALS | _Seen.SUM


def softmaxes_apart(level: Level, softmaxes: Softmaxes) -> Iterator[tuple[Unit, str]]:
    """Yield calls whose softmax is read by a product outside, and what they are in words.

    Args:
      level: where the calls are.
      softmaxes: what is known of their jaxprs.
    """
    if not any(
        wiring(unit.eqn) is Wiring.CALL and softmaxes.has_exponential(called(unit.eqn).jaxpr)
        for unit in level.equations()
    ):
        return
    seen: dict[int, _Seen] = {}
    weights: dict[int, Unit] = {}  # per value: the call that its weights are from
    for unit in level.equations():
        read, made = numbers(unit.ins), numbers(unit.outs)
        name = unit.eqn.primitive.name
        sources = {weights[a]: None for a in read if a in weights}
        if name == "dot_general":
            yield from ((source, _words(source)) for source in sources)
            weights = {a: source for a, source in weights.items() if source not in sources}
        elif name not in ("reduce_sum", "reduce_max"):
            weights.update((a, source) for a in made for source in sources)
        inputs = [
            seen.get(a, _Seen.NOTHING) if isinstance(a, int) else _Seen.NOTHING for a in unit.ins
        ]
        if wiring(unit.eqn) is Wiring.CALL:
            for atom, flags in zip(unit.outs, _through(called(unit.eqn), inputs), strict=True):
                if isinstance(atom, int):
                    seen[atom] = flags & _Seen.SCORES
                    if _WEIGHTS in flags:
                        weights[atom] = unit
        else:
            seen.update(dict.fromkeys(made, _after(unit.eqn, inputs) & _Seen.SCORES))


def _through(closed: ClosedJaxpr, inputs: Sequence[_Seen]) -> list[_Seen]:
    """Return what the results of a call are computed from."""

    def visit(eqn: JaxprEqn, operands: Sequence[_Seen]) -> Sequence[_Seen]:
        if wiring(eqn) is Wiring.CALL:
            return _through(called(eqn), operands)
        return [_after(eqn, operands)] * len(eqn.outvars)

    consts = [_Seen.NOTHING] * len(closed.jaxpr.constvars)
    return walk(closed.jaxpr, consts, inputs, visit, lambda literal: _Seen.NOTHING)


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
