"""A history: what a step under delayed scaling takes, rounds by, enters and returns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxamp.core.formats import CastConfig
from jaxamp.core.kept_rounding import reduce_to
from jaxamp.errors import RewriteError, TrainingError
from jaxamp.quantized.lowp import ScaledArray
from jaxamp.quantized.lowp.arithmetic import scale_factor
from jaxamp.quantized.lowp.scaled_array import stored_scale, with_scale


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


def widened(x: Any, dtype: Any) -> jax.Array:
    """Return an array in float32, rounded to a narrow dtype; it is not differentiated from here.

    XLA:GPU would remove a narrowing before a widening, and move the narrowing before the
    concatenations that make the array. Their parts are then read by two operations behind them,
    and stored for that: JAX 0.10.2, ``python -m benchmarks.fp8_step --target h200``.
    """
    x = _undifferentiable(x)
    wide = lax.convert_element_type(x, np.float32)
    if x.dtype == dtype:
        return wide
    reduced = reduce_to(wide, dtype)
    if reduced is not None:
        return reduced
    return lax.convert_element_type(lax.convert_element_type(x, dtype), np.float32)


def row_maxima(wide: Any) -> jax.Array:
    """Return the largest magnitude along the last axis, as wide arrays have one less.

    Along that axis alone, the maximum is found in the kernel that makes the array.
    """
    return lax.reduce_max(jnp.abs(wide), (wide.ndim - 1,))


def finite(magnitudes: Any) -> jax.Array:
    """Return magnitudes with zero for infinities and NaN, which no history keeps."""
    return jnp.where(jnp.isfinite(magnitudes), magnitudes, 0)


def largest(magnitudes: Any) -> jax.Array:
    """Return the largest finite magnitude along the last axis; zero if there is none."""
    return jnp.max(finite(magnitudes), axis=-1, initial=0)


def known_scale(amax: Any, cast: CastConfig) -> jax.Array:
    """Return the scale of a magnitude in float32; one where none was recorded yet."""
    scale = scale_factor(amax, cast.out_dtype, round_up=cast.round_sf)
    return jnp.where(amax == 0, np.float32(1), scale)


def rounded(wide: Any, scale: Any, cast: CastConfig) -> ScaledArray:
    """Quantize an array that was rounded to 16 bits, with a scale that is known.

    Larger values are clipped, but infinities and NaN become NaN of 8 bits.
    """
    return with_scale(_infinite_as_nan(wide), stored_scale(scale, cast), cast)


def _infinite_as_nan(wide: jax.Array) -> jax.Array:
    """Return 16-bit floats, in float32, with NaN for infinities.

    One more bit makes an infinity NaN, and is rounded away in a number. Where this selects by a
    comparison, XLA:GPU stores the comparison of what it transposes: JAX 0.10.2.
    """
    bits = lax.bitcast_convert_type(wide, np.int32) | np.int32(1)
    return lax.reduce_precision(lax.bitcast_convert_type(bits, np.float32), 8, 10)


History = Mapping[str, Any]
MAGNITUDES = "amax"  # its key: a row per step, the last first, a column per tensor
CARRIED = "carried"  # its key: parameters in 8 bits
_KEY = re.compile(rf"{MAGNITUDES}|{CARRIED}|\d+:loop")


def is_history(value: Any) -> bool:
    """Return whether a value has the keys of a history."""
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and _KEY.fullmatch(key) for key in value
    )


def parts(history: History | None) -> tuple[History | None, History | None]:
    """Split a history, if there is one, into magnitudes and parameters in 8 bits."""
    if history is None:
        return None, None
    return {k: v for k, v in history.items() if k != CARRIED}, history.get(CARRIED, {})


def check(is_of_this_step: bool) -> None:
    """Raise unless what is read of a history is what this step has written."""
    if not is_of_this_step:
        raise TrainingError(
            "The history is not this step's: of another function, policy or constant argument, or "
            "of loops with another number of iterations. Make a new one with step.init(*args)."
        )


class BodyHistory:
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
        self.rows: list[Any] = []  # this step's magnitudes, maxima of the rows of each tensor
        self.narrow: dict[tuple[Any, ...], tuple[Any, ScaledArray]] = {}
        self.largest = None
        if history is not None and MAGNITUDES in history:
            window = history[MAGNITUDES]
            check(isinstance(window, jax.Array) and window.ndim == 2 and len(window) == length)
            check(window.dtype == np.float32)
            self.largest = jnp.max(window, axis=0)

    def inside(self, history: History | None, arguments: Sequence[Any]) -> BodyHistory:
        """Return the history of the body of a loop in it."""
        return BodyHistory(history, self.length, arguments, measures=self.measures)

    def note_readers(self, arrays: Iterable[Any]) -> None:
        """Record arguments that others read than quantized dots and the moves before these."""
        self.read_by_others |= set(map(id, arrays)) & self.arguments.keys()

    def loop(self, emit: Callable[[History | None], tuple[list[Any], History]]) -> list[Any]:
        """Emit a loop with its part of the history."""
        key = f"{len(self.loops)}:loop"
        before = None if self.before is None else self.before.get(key)
        check(self.before is None or isinstance(before, Mapping))
        results, self.loops[key] = emit(before)
        return results

    def quantized(self, x: Any, cast: CastConfig, dtype: Any) -> ScaledArray:
        """Round an array and quantize it with the scale of earlier steps; record its magnitudes."""
        key = id(x), cast, dtype
        if key not in self.narrow:
            rows = row_maxima(widened(x, dtype)).reshape(1, -1)
            amax = self.enter(self.reserve(1), rows)[0]
            # Magnitudes of a parameter are found where an optimizer reads it: XLA:GPU would find
            # them of an array in the layout that a product reads, and store that in float32.
            apart = lax.optimization_barrier(x) if id(x) in self.read_by_others else x
            made = rounded(widened(apart, dtype), known_scale(amax, cast), cast)
            # Behind a barrier the kernel that makes the array writes the 8 bits too.
            values = lax.optimization_barrier(made.values)
            self.narrow[key] = x, replace(made, values=values, dtype=np.dtype(dtype))
        return self.narrow[key][1]

    def reserve(self, count: int) -> int:
        """Add columns for tensors and return the first."""
        first = len(self.rows)
        self.rows += [None] * count
        check((self.largest is None) == (self.before is None))
        check(self.largest is None or len(self.rows) <= len(self.largest))
        return first

    def enter(self, first: int, rows: jax.Array) -> jax.Array:
        """Enter this step's magnitudes, a row for each tensor, and return those that scales are of.

        They are the largest of earlier steps; before the first step, of this one.
        """
        end = first + len(rows)
        self.rows[first:end] = [lax.index_in_dim(rows, i, keepdims=False) for i in range(len(rows))]
        if self.largest is None:
            return largest(rows)
        return self.largest[first:end]

    def after(self) -> History:
        """Return the history with this step in it; if it is not measured, what else has changed."""
        check(self.largest is None or len(self.rows) == len(self.largest))
        keys = {*([MAGNITUDES] if self.rows else []), *self.loops}
        check(self.before is None or self.before.keys() == keys)
        if not self.measures:
            return {}
        return {**({MAGNITUDES: self._window()} if self.rows else {}), **self.loops}

    def _window(self) -> jax.Array:
        """Return the magnitudes of this step above those of earlier ones, f32[steps, tensors]."""
        longest = max(map(len, self.rows))
        padded = [jnp.pad(row, (0, longest - len(row))) for row in self.rows]
        seen = jnp.max(finite(jnp.stack(padded)), axis=1)[None]
        shape = self.length, len(padded)
        window = jnp.zeros(shape, np.float32) if self.before is None else self.before[MAGNITUDES]
        check(window.shape == shape)
        return jnp.concatenate([seen, window])[: self.length]
