"""Round float32 to a narrower format in an operation that XLA keeps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def reduce_to(value: Any, dtype: Any) -> jax.Array | None:
    """Return a value rounded to `dtype`, in its own; ``None`` where subnormal numbers matter.

    XLA may remove a cast that is cast back, and never undoes ``lax.reduce_precision``. That flushes
    subnormal numbers, which matter in formats of a smaller range than float32's.

    >>> reduce_to(jnp.float32(257), jnp.bfloat16)
    Array(256., dtype=float32)
    >>> reduce_to(jnp.float32(257), jnp.float16)

    See: https://openxla.org/stablehlo/spec#reduce_precision
    """
    info = jnp.finfo(dtype)
    if info.nexp < jnp.finfo(jnp.float32).nexp:
        return None
    return lax.reduce_precision(value, info.nexp, info.nmant)
