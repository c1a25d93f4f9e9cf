"""Round to 8 bits with a scale that is known before the array is, that of an earlier magnitude."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxamp.core.formats import CastConfig
from jaxamp.core.kept_rounding import reduce_to
from jaxamp.errors import RewriteError
from jaxamp.quantized.lowp import ScaledArray
from jaxamp.quantized.lowp.arithmetic import scale_factor
from jaxamp.quantized.lowp.quantize import stored_scale, with_scale


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
