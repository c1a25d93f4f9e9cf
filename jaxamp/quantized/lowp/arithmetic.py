"""The arithmetic of scaling, elementwise, so that kernels share it with the reference.

Every step gives the same bits on every backend. A scale is ``amax * (1 / fmax)`` with the constant
rounded to f32, because compilers turn a division by a constant into just that; powers of two are
made of bits; values are clipped before they are cast, as e4m3 overflows to NaN; and scales have a
lower bound, beneath which a backend that flushes subnormal numbers would differ from one that does
not.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxamp.core.formats import CastConfig, Precision

_EXPONENT = 0x7F800000
_MANTISSA = 0x007FFFFF
_ONE = 0x3F800000
_MAGNITUDE = 0x7FFFFFFF


def smallest_scale(precision: Precision) -> float:
    """Return the lower bound of a scale: with it, a subnormal f32 number is rounded to zero.

    >>> smallest_scale(Precision.F8_E4M3) == 2.0**-116
    True
    """
    return 2 * Precision.F32.smallest_normal / precision.smallest_subnormal


def magnitude_bits(x: Any) -> jax.Array:
    """Return the bits of float32 numbers without their sign, as int32.

    They order as the magnitudes do, NaN above infinity, so that a maximum of them loses no NaN.

    >>> import jax.numpy as jnp
    >>> bits = magnitude_bits(jnp.array([-2.0, 1.0, -jnp.inf, jnp.nan]))
    >>> bool(bits[1] < bits[0] < bits[2] < bits[3])
    True
    """
    return lax.bitcast_convert_type(x, np.int32) & np.int32(_MAGNITUDE)


def scale_factor(amax: Any, precision: Precision, *, round_up: bool = False) -> jax.Array:
    """Return the scale with which ``amax`` becomes the largest number of a format, in float32.

    It is rounded up to a power of two if one asks; NaN where ``amax`` is infinite or NaN, so that
    what cannot be represented is not hidden.
    """
    amax = lax.convert_element_type(amax, np.float32)
    scale = amax * np.float32(1 / precision.max)
    scale = jnp.maximum(scale, np.float32(smallest_scale(precision)))
    scale = power_of_two(scale) if round_up else scale
    return jnp.where(amax < np.inf, scale, np.float32(np.nan))


def scales_of(magnitudes: Any, cast: CastConfig) -> tuple[jax.Array, jax.Array]:
    """Return the scales of largest magnitudes, which are given by their bits, and the reciprocals.

    Bits are compared, as `magnitude_bits` says: what the maximum of a vector unit makes of a NaN
    is its maker's business.
    """
    amax = lax.bitcast_convert_type(magnitudes, np.float32)
    scale = scale_factor(amax, cast.out_dtype, round_up=cast.round_sf)
    return scale, reciprocal(scale, is_power=cast.round_sf)


def power_of_two(x: Any) -> jax.Array:
    """Return the smallest power of two that is not less than a positive, normal float32 number.

    >>> float(power_of_two(jnp.float32(5))), float(power_of_two(jnp.float32(4)))
    (8.0, 4.0)
    """
    bits = lax.bitcast_convert_type(x, np.int32)
    return lax.bitcast_convert_type((bits + _MANTISSA) & _EXPONENT, np.float32)


def reciprocal(scale: Any, *, is_power: bool = False) -> jax.Array:
    """Compute ``1 / scale``, for a power of two, 2**-126 to 2**126, by its bits; zero for zero."""
    if is_power:
        bits = 2 * _ONE - lax.bitcast_convert_type(scale, np.int32)
        return lax.bitcast_convert_type(bits, np.float32)
    return jnp.where(scale == 0, np.float32(0), np.float32(1) / scale)


def encode(x: Any, scale: Any, inverse: Any, precision: Precision) -> jax.Array:
    """Multiply by ``inverse``, clip and round to a format; zeros where the scale is NaN."""
    largest = np.float32(precision.max)
    scaled = lax.convert_element_type(x, np.float32) * inverse
    clipped = jnp.minimum(jnp.maximum(scaled, -largest), largest)
    finite = jnp.where(jnp.isnan(scale), np.float32(0), clipped)
    return lax.convert_element_type(finite, precision.dtype)
