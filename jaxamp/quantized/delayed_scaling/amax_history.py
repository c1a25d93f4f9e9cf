"""Run a program whose quantized dots take their scales from a history of magnitudes.

See: https://nvidia.github.io/TransformerEngine, "FP8 Delayed Scaling".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var
from jax.lax import optimization_barrier_p

from jaxamp.core import jax_compat
from jaxamp.core.formats import CastConfig
from jaxamp.core.taxonomy import Trait, op_of
from jaxamp.jaxprs.interpret import evaluate
from jaxamp.jaxprs.nested import Wiring, called, loop, nested, wiring
from jaxamp.quantized.choices.scaled import Scaled
from jaxamp.quantized.delayed_scaling.carried_parameters import CarriedParameters, Source
from jaxamp.quantized.delayed_scaling.history import CARRIED, BodyHistory, History, check, parts
from jaxamp.quantized.lowp import ScaledArray
from jaxamp.quantized.primitives.quantized_dot import quantized_dot_p
from jaxamp.quantized.primitives.quantized_product import product

_MOVES = (Trait.SHAPE, Trait.CONVERT)


def run_with_history(
    closed: ClosedJaxpr,
    arrays: Sequence[Any],
    history: History | None,
    length: int,
    *,
    measures: bool,
    returned: Mapping[int, int],
    advances: bool,
) -> tuple[list[Any], History]:
    """Run a program whose quantized dots take their scales from a history, if it has any yet.

    With `measures`, this step's magnitudes are found. `returned` parameters are carried in 8 bits:
    for the position of each among the arguments, that of its new value among the results. Those of
    the new values are carried if it `advances`, else those of the arguments.

    Returns:
      The results, and what the history for the next step has anew.

    Raises:
      TrainingError: the history is of another program.
    """
    magnitudes, eight_bits = parts(history)
    body_history = BodyHistory(magnitudes, length, arrays, measures=measures)
    carried = CarriedParameters(arrays, returned, eight_bits, body_history)
    results = _HistoryInterpreter(body_history, carried).inline(closed, arrays)
    after = carried.after({a: results[r] for a, r in returned.items()} if advances else None)
    return results, {**body_history.after(), **({CARRIED: after} if after else {})}


class _HistoryInterpreter:
    """Interpreter of jaxprs that quantizes with the scales of a history, and records magnitudes."""

    def __init__(self, body_history: BodyHistory, carried: CarriedParameters) -> None:
        self.body_history, self.carried = body_history, carried
        self.moves = _Moves()

    def body(
        self, closed: ClosedJaxpr, args: Sequence[Any], history: History | None
    ) -> tuple[list[Any], History]:
        """Run the body of a loop with the history of its own dots and loops."""
        outside = self.body_history
        self.body_history = outside.inside(history, args)
        results = self.inline(closed, args)
        inside, self.body_history = self.body_history, outside
        return results, inside.after()

    def inline(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        eqns, given = closed.jaxpr.eqns, zip(args, closed.jaxpr.invars, strict=True)
        others = (e for e in eqns if not _moves(e) and not _takes_history(e))
        read = {v for eqn in others for v in eqn.invars if isinstance(v, Var)}
        self.body_history.note_readers(x for x, var in given if var in read)
        return evaluate(closed, args, self.emit)

    def emit(self, eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
        if _takes_history(eqn):
            return _RULES[wiring(eqn)](self, eqn, operands)
        results = jax_compat.bind(eqn, operands)
        self.moves.note(eqn, operands, results)
        return results

    def dot(self, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """Emit a quantized dot with the scales of earlier steps."""
        how: Scaled = eqn.params["how"]
        lhs, rhs = map(self.rounded, operands, how.casts)
        return [product(lhs, rhs, eqn.params["dtype"])]

    def rounded(self, x: Any, cast: CastConfig) -> ScaledArray:
        """Quantize an operand where it was computed, and repeat the moves behind it."""
        source, moves = self.moves.trace_back(x)
        carried = self.carried.read(source, cast, x.dtype)
        made = carried or self.body_history.quantized(source, cast, x.dtype)
        values = made.values
        for move in moves:
            (values,) = jax_compat.bind(move, [values])
        return replace(made, values=values)

    def call(self, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """Emit a call in place; recomputation stays behind a barrier, as in a checkpoint."""
        if eqn.params.get("prevent_cse"):
            behind = optimization_barrier_p.bind(*operands)
            for parameter, same in zip(map(self._parameter, operands), behind, strict=True):
                if parameter is not None:
                    self.carried.note(replace(parameter, array=same))
            operands = behind
        return self.inline(called(eqn), operands)

    def scan(self, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """Emit a scan, whose histories have a row for each iteration."""
        wired, length = loop(eqn), eqn.params["length"]
        _, invariants, carries, sliced = wired.parts(operands)

        parameters = [self._parameter(x) for x in sliced]

        def iteration(carry: Any, slices: Any) -> Any:
            xs, eight_bits, rows = slices
            for parameter, x, held in zip(parameters, xs, eight_bits, strict=True):
                if parameter is not None:
                    self.carried.note(parameter.sliced(x, length, held))
            outs, made = self.body(wired.body, [*invariants, *carry, *xs], rows)
            return outs[: wired.carries], (outs[wired.carries :], made)

        def emit(history: History | None) -> tuple[list[Any], History]:
            check(all(leaf.shape[:1] == (length,) for leaf in jax.tree.leaves(history)))
            params = {name: eqn.params[name] for name in ("reverse", "unroll")}
            xs = list(sliced), [p and p.stacks for p in parameters], history
            carry, (stacks, made) = lax.scan(iteration, list(carries), xs, length, **params)
            return [*carry, *stacks], made

        return self.body_history.loop(emit)

    def _parameter(self, x: Any) -> Source | None:
        """Return of which carried parameter an array is the whole or a slice, rounded or not."""
        source, moves = self.moves.trace_back(x)
        return None if moves else self.carried.source(source)


class _Moves:
    """Moves and 16-bit roundings between arrays and operands of quantized dots."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[Any, Any, JaxprEqn]] = {}  # holds arrays, so ids stay theirs

    def note(self, eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Record an equation that moves an array or rounds it."""
        if _moves(eqn) and _is_float_array(operands[0]):
            self._sources[id(results[0])] = results[0], operands[0], eqn

    def trace_back(self, x: Any) -> tuple[Any, list[JaxprEqn]]:
        """Return the array that an operand was moved or rounded from, and the moves."""
        moves: list[JaxprEqn] = []
        while id(x) in self._sources:
            _, x, eqn = self._sources[id(x)]
            if eqn.primitive.name != "convert_element_type":
                moves.insert(0, eqn)
        return x, moves


def _moves(eqn: JaxprEqn) -> bool:
    """Return whether the numbers of a result are those of the one operand, rounded or not."""
    return op_of(eqn.primitive).trait in _MOVES and len(eqn.invars) == 1


def _is_float_array(x: Any) -> bool:
    aval = jax.typeof(x)
    return aval.ndim > 0 and jnp.issubdtype(aval.dtype, jnp.floating)


_RULES = {
    None: _HistoryInterpreter.dot,  # a quantized dot, which holds no jaxpr
    Wiring.SCAN: _HistoryInterpreter.scan,
    Wiring.CALL: _HistoryInterpreter.call,
}


def _takes_history(eqn: JaxprEqn) -> bool:
    if eqn.primitive is quantized_dot_p:
        casts = eqn.params["how"].casts
        return all(cast.sf_block is None and cast.out_dtype.bits == 8 for cast in casts)
    is_entered = eqn.primitive.name != "shard_map" and wiring(eqn) in _RULES
    return is_entered and any(_takes_history(e) for b in nested(eqn) for e in b.jaxpr.eqns)
