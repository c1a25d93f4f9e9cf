"""Run a program whose quantized dots take their scales from a history of magnitudes.

See: https://nvidia.github.io/TransformerEngine, "FP8 Delayed Scaling".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.lax import optimization_barrier_p

from jaxamp.core import jax_compat
from jaxamp.core.formats import CastConfig
from jaxamp.core.kept_rounding import reduce_to
from jaxamp.errors import RewriteError, TrainingError
from jaxamp.jaxprs.interpret import evaluate
from jaxamp.jaxprs.nested import Wiring, called, loop, nested, wiring
from jaxamp.lowp import ScaledArray
from jaxamp.lowp.arithmetic import scale_factor
from jaxamp.lowp.quantize import stored_scale, with_scale
from jaxamp.plan import Scaled
from jaxamp.rewrite.primitives.quantized_dot import quantized_dot_p
from jaxamp.rewrite.primitives.quantized_product import product

History = Mapping[str, Any]
MAGNITUDES = "amax"  # key of a history: a row per step, the last first, a column per tensor
_KEY = re.compile(rf"{MAGNITUDES}|\d+:loop")
_MOVES = {"transpose", "reshape", "squeeze", "convert_element_type"}


def is_history(value: Any) -> bool:
    """Return whether a value has the keys of a history."""
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and _KEY.fullmatch(key) for key in value
    )


def run_with_history(
    closed: ClosedJaxpr,
    arrays: Sequence[Any],
    history: History | None,
    length: int,
    *,
    measures: bool = True,
) -> tuple[list[Any], History]:
    """Run a program whose quantized dots take their scales from a history.

    Args:
      closed: the program.
      arrays: its arguments.
      history: one that this program has made; ``None`` for its first step.
      length: number of steps for which a magnitude is kept.
      measures: whether this step's magnitudes are found.

    Returns:
      The results, and the history with this step in it; an empty one if nothing is measured.

    Raises:
      TrainingError: the history is of another program.
    """
    return _HistoryInterpreter(length, measures=measures).run(closed, arrays, history)


class _HistoryInterpreter:
    """Interpreter of jaxprs that quantizes with the scales of a history, and records magnitudes."""

    def __init__(self, length: int, *, measures: bool) -> None:
        self.length, self.measures = length, measures
        self.moves = _Moves()
        self.body_history = _BodyHistory(None, length, (), measures=measures)

    def run(
        self, closed: ClosedJaxpr, args: Sequence[Any], history: History | None
    ) -> tuple[list[Any], History]:
        """Run a program, or the body of a loop, with the history of its own dots and loops."""
        outside = self.body_history
        self.body_history = _BodyHistory(history, self.length, args, measures=self.measures)
        results = self.inline(closed, args)
        inside, self.body_history = self.body_history, outside
        return results, inside.after()

    def inline(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        self.body_history.note_readers(closed.jaxpr, args)
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
        return [product(lhs, rhs, eqn.params["dtype"], how.kernel)]

    def rounded(self, x: Any, cast: CastConfig) -> ScaledArray:
        """Quantize an operand where it was computed, and repeat the moves behind it."""
        source, moves = self.moves.trace_back(x)
        made = self.body_history.quantized(source, cast, x.dtype)
        values = made.values
        for move in moves:
            (values,) = jax_compat.bind(move, [values])
        return replace(made, values=values)

    def call(self, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """Emit a call in place; recomputation stays behind a barrier, as in a checkpoint."""
        if eqn.params.get("prevent_cse"):
            operands = optimization_barrier_p.bind(*operands)
        return self.inline(called(eqn), operands)

    def scan(self, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """Emit a scan, whose histories have a row for each iteration."""
        wired, length = loop(eqn), eqn.params["length"]
        _, invariants, carries, sliced = wired.parts(operands)

        def iteration(carry: Any, slices: Any) -> Any:
            xs, rows = slices
            outs, made = self.run(wired.body, [*invariants, *carry, *xs], rows)
            return outs[: wired.carries], (outs[wired.carries :], made)

        def emit(history: History | None) -> tuple[list[Any], History]:
            _check(all(leaf.shape[:1] == (length,) for leaf in jax.tree.leaves(history)))
            params = {name: eqn.params[name] for name in ("reverse", "unroll")}
            xs = list(sliced), history
            carry, (stacks, made) = lax.scan(iteration, list(carries), xs, length, **params)
            return [*carry, *stacks], made

        return self.body_history.loop(emit)


class _BodyHistory:
    """The history of a program or of the body of a loop, and the magnitudes of this step.

    All windows are one array, and so are this step's magnitudes: those of dozens of tensors cost a
    few kernels. A tensor that several dots read is quantized once.
    """

    def __init__(
        self, history: History | None, length: int, arguments: Sequence[Any], *, measures: bool
    ) -> None:
        self.before, self.length, self.measures = history, length, measures
        self.arguments = {id(x): x for x in arguments}  # of the program, or of the loop's body
        self.read_by_others: set[int] = set()  # of these, what is read besides quantized dots
        self.loops: dict[str, Any] = {}
        self.rows: list[Any] = []  # this step's magnitudes, a maximum for each row of a tensor
        self.narrow: dict[tuple[Any, ...], tuple[Any, ScaledArray]] = {}
        self.largest = None
        if history is not None and MAGNITUDES in history:
            window = history[MAGNITUDES]
            _check(isinstance(window, jax.Array) and window.ndim == 2 and len(window) == length)
            _check(window.dtype == np.float32)
            self.largest = jnp.max(window, axis=0)

    def note_readers(self, jaxpr: Jaxpr, args: Sequence[Any]) -> None:
        """Record arguments that others read than quantized dots and the moves before these."""
        others = (e for e in jaxpr.eqns if e.primitive.name not in _MOVES and not _takes_history(e))
        read = {v for eqn in others for v in eqn.invars if isinstance(v, Var)}
        given = {id(x) for x, var in zip(args, jaxpr.invars, strict=True) if var in read}
        self.read_by_others |= given & self.arguments.keys()

    def loop(self, emit: Callable[[History | None], tuple[list[Any], History]]) -> list[Any]:
        """Emit a loop with its part of the history."""
        key = f"{len(self.loops)}:loop"
        before = None if self.before is None else self.before.get(key)
        _check(self.before is None or isinstance(before, Mapping))
        results, self.loops[key] = emit(before)
        return results

    def quantized(self, x: Any, cast: CastConfig, dtype: Any) -> ScaledArray:
        """Quantize an array with the scale of earlier steps; record its magnitudes.

        Args:
          x: floats.
          cast: the quantization.
          dtype: to which it is rounded first.
        """
        key = id(x), cast, dtype
        if key not in self.narrow:
            is_read = id(x) in self.read_by_others
            wide = _widened(_undifferentiable(x), dtype)
            made = self._quantize(wide, cast, is_read_by_others=is_read)
            self.narrow[key] = x, replace(made, dtype=np.dtype(dtype))
        return self.narrow[key][1]

    def _quantize(self, wide: Any, cast: CastConfig, *, is_read_by_others: bool) -> ScaledArray:
        # Along the last axis alone, the maximum is found in the kernel that makes the array.
        rows = lax.reduce_max(jnp.abs(wide), (wide.ndim - 1,)).reshape(-1)
        index = len(self.rows)
        _check((self.largest is None) == (self.before is None))
        _check(self.largest is None or index < len(self.largest))
        amax = jnp.max(_finite(rows), initial=0) if self.largest is None else self.largest[index]
        made = _rounded(wide, amax, cast)
        # A clipped infinity must not pass for a number.
        nan = jnp.asarray(np.nan, made.values.dtype)
        values = jnp.where(jnp.abs(wide) < np.inf, made.values, nan)
        # With the barrier that kernel writes the 8 bits too, which other layouts are copied from.
        # Magnitudes stay before it. Those of a parameter are found where an optimizer reads it. A
        # kernel that rounds, and finds none, writes both layouts where there is no barrier.
        if self.measures and not is_read_by_others:
            values = lax.optimization_barrier(values)
        self.rows.append(rows)
        return replace(made, values=values)

    def after(self) -> History:
        """Return the history with this step in it; an empty one if nothing is measured."""
        if not self.measures:
            return {}
        after = {**({MAGNITUDES: self._window()} if self.rows else {}), **self.loops}
        _check(self.before is None or self.before.keys() == after.keys())
        return after

    def _window(self) -> jax.Array:
        """Return the magnitudes of this step above those of earlier ones, f32[steps, tensors]."""
        longest = max(map(len, self.rows))
        padded = [jnp.pad(row, (0, longest - len(row))) for row in self.rows]
        seen = jnp.max(_finite(jnp.stack(padded)), axis=1)[None]
        shape = self.length, len(padded)
        window = jnp.zeros(shape, np.float32) if self.before is None else self.before[MAGNITUDES]
        _check(window.shape == shape)
        return jnp.concatenate([seen, window])[: self.length]


def _check(is_of_this_step: bool) -> None:
    """Raise unless what is read of a history is what this step has written."""
    if not is_of_this_step:
        raise TrainingError(
            "The history is not this step's: of another function, policy or constant argument, or "
            "of loops with another number of iterations. Make a new one with step.init(*args)."
        )


def _finite(magnitudes: Any) -> jax.Array:
    """Return magnitudes with zero for infinities and NaN, which no history keeps."""
    return jnp.where(jnp.isfinite(magnitudes), magnitudes, 0)


class _Moves:
    """Moves and 16-bit roundings between arrays and operands of quantized dots."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[Any, Any, JaxprEqn]] = {}  # holds arrays, so ids stay theirs

    def note(self, eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Record an equation that moves an array or rounds it."""
        if eqn.primitive.name in _MOVES and _is_float_array(operands[0]):
            self._sources[id(results[0])] = results[0], operands[0], eqn

    def trace_back(self, x: Any) -> tuple[Any, list[JaxprEqn]]:
        """Return the array that an operand was moved or rounded from, and the moves."""
        moves: list[JaxprEqn] = []
        while id(x) in self._sources:
            _, x, eqn = self._sources[id(x)]
            if eqn.primitive.name != "convert_element_type":
                moves.insert(0, eqn)
        return x, moves


@jax.custom_jvp
def _undifferentiable(x: Any) -> Any:
    """Return the array itself, and refuse to be differentiated."""
    return x


@_undifferentiable.defjvp
def _refuse(*_: Any) -> Any:
    raise RewriteError(
        "A step under delayed scaling is not differentiated: the magnitudes of its gradients are "
        "part of its history. Put the gradient inside: "
        "amp(lambda *args: jax.value_and_grad(loss)(*args), 'fp8_delayed').",
        primitive="quantized_dot",
    )


def _rounded(x: Any, amax: Any, cast: CastConfig) -> ScaledArray:
    """Quantize an array with the scale of a magnitude; larger values are clipped."""
    scale = scale_factor(amax, cast.out_dtype, round_up=cast.round_sf)
    scale = jnp.where(amax == 0, np.float32(1), scale)  # no magnitude was recorded yet
    return with_scale(x, stored_scale(scale, cast), cast)


def _widened(x: Any, dtype: Any) -> jax.Array:
    """Return an array in float32, rounded to a narrow dtype.

    XLA:GPU would remove a narrowing before a widening, and move the narrowing before the
    concatenations that make the array. Their parts are then read by two operations behind them,
    and stored for that: JAX 0.10.2, ``python -m benchmarks.fp8_step --target h200``.
    """
    wide = lax.convert_element_type(x, np.float32)
    if x.dtype == dtype:
        return wide
    reduced = reduce_to(wide, dtype)
    if reduced is not None:
        return reduced
    return lax.convert_element_type(lax.convert_element_type(x, dtype), np.float32)


def _is_float_array(x: Any) -> bool:
    aval = jax.typeof(x)
    return aval.ndim > 0 and jnp.issubdtype(aval.dtype, np.floating)


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
    return is_entered and any(_has_dots(body.jaxpr) for body in nested(eqn))


def _has_dots(jaxpr: Jaxpr) -> bool:
    return any(map(_takes_history, jaxpr.eqns))
