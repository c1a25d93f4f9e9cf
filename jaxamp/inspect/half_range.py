"""Arguments that float16 cannot hold: images in counts, prices, times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxamp.core.formats import Precision


def beyond_f16(argument: str, largest: float) -> str:
    """Return what comes of an argument that float16 cannot hold, and what to do.

    >>> beyond_f16("image", 1e5)[:71]
    'The argument image holds numbers up to 1e+05, and float16 ends at 65504'
    """
    return (
        f"The argument {argument} holds numbers up to {largest:.4g}, and float16 ends at "
        f"{Precision.F16.max:.0f}: an operation that reads it in float16 gets infinities. "
        "Scale it before the call, or take mixed_bf16, which has the range of float32."
    )


def too_large_for_f16(names: Sequence[str], arrays: Sequence[Any]) -> tuple[str, ...]:
    """Return the remarks on the arguments whose float32 numbers float16 cannot hold."""
    found = zip(names, map(peak_of_f32, arrays), strict=True)
    return tuple(beyond_f16(name, peak) for name, peak in found if peak > Precision.F16.max)


def peak_of_f32(array: Any) -> float:
    """Return the largest finite magnitude of a float32 array that has numbers here; else 0."""
    is_known = isinstance(array, np.ndarray) or (
        isinstance(array, jax.Array)
        and not isinstance(array, Tracer)
        and array.is_fully_addressable
    )
    return largest_finite(array) if is_known and array.dtype == np.float32 else 0.0


def largest_finite(array: Any) -> float:
    """Return the largest finite magnitude of an array; 0 where its numbers are no floats."""
    return float(_peak(array)) if jnp.issubdtype(array.dtype, jnp.inexact) else 0.0


@jax.jit
def _peak(array: Any) -> Any:
    return jnp.max(jnp.abs(array), where=jnp.isfinite(array), initial=0)
