"""``unbarriered`` primitive: the operand of a sum, read from before its rounding barrier.

XLA:GPU sums in the kernel that computes the summands, but reads them from memory if a barrier is in
between. The rounding still counts: instead of the barrier, a select between NaN and number stands
between it and the widening, so that XLA does not recognize the pair.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxamp.core import jax_compat
from jaxamp.core.define import define

unbarriered_p = Primitive("unbarriered")

_ONE_PASS = 4096
"""XLA:GPU sums up to this many rows in one pass, by a kernel of its own.

`ReductionDimensionRaceFreeBound` in `xla/service/gpu/reduction_utils.cc`: 32 × 128.
"""


def unbarriered(wide: Any) -> Any:
    """Return a widened summand, read from before its barrier where that is cheaper.

    A recomputed value, which has no barrier of its own, is read as it is.
    """
    return unbarriered_p.bind(wide)


def summand(rounded: Any, dtype: Any) -> Any:
    """Widen a rounded value in a form in which XLA does not remove the rounding."""
    number = lax.select(lax.eq(rounded, rounded), rounded, lax.full_like(rounded, np.nan))
    return lax.convert_element_type(number, dtype)


def _has_many_rows(shape: tuple[Any, ...]) -> bool:
    is_known = all(isinstance(size, int) for size in shape)  # symbolic sizes cannot be compared
    return is_known and math.prod(shape[:-1]) > _ONE_PASS


def _same(wide: Any) -> Any:
    return wide


def _lowered(context: Any, wide: Any) -> Any:
    (aval,) = context.avals_in
    is_cheaper = jax_compat.is_for_gpu(context) and _has_many_rows(aval.shape)
    found = jax_compat.before_barrier(wide) if is_cheaper else None
    if found is None:
        return [wide]
    rounded, dtype = found
    lower = mlir.lower_fun(lambda x: summand(x, aval.dtype), multiple_results=False)
    return lower(context.replace(avals_in=[aval.update(dtype=dtype, weak_type=False)]), rounded)


define(unbarriered_p, _same, _same, lambda args, dims: (unbarriered(*args), *dims), lowered={})
ad.deflinear2(unbarriered_p, lambda cotangent, wide: [cotangent])
mlir.register_lowering(
    unbarriered_p, _lowered, cacheable=False
)  # cached, it would be a function that cannot see what computes its operand
