"""What a sum reads of a rounded value: the rounding, before the barrier that holds it.

XLA:GPU sums in the kernel that makes what is summed, and reads it from memory if a barrier is
between the two. The rounding is still what counts. A choice between NaN and number, in which XLA
does not see a rounding followed by a widening, is between them instead.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxamp.taxonomy import OpKind, Trait, register_op_kind

unheld_p = Primitive("unheld")
register_op_kind(unheld_p, OpKind.BOUNDARY, trait=Trait.OPAQUE)

_ONE_PASS = 4096
"""XLA:GPU sums up to this many rows in one pass, by a kernel of its own.

`ReductionDimensionRaceFreeBound` in `xla/service/gpu/reduction_utils.cc`: 32 × 128.
"""


def unheld(wide: Any, rounded: Any) -> Any:
    """A value that is summed, from before the barrier where that is cheaper.

    Args:
      wide: the value, from behind the barrier; its tangent is the result's.
      rounded: what it is a widening of, before the barrier.
    """
    return unheld_p.bind(wide, rounded)


def _wide(wide: Any, rounded: Any) -> Any:
    return wide


def summand(wide: Any, rounded: Any) -> Any:
    """What a sum reads on a GPU: the arguments are those of `unheld`."""
    if not _has_many_rows(wide.shape):
        return wide
    number = lax.select(lax.eq(rounded, rounded), rounded, lax.full_like(rounded, np.nan))
    return lax.convert_element_type(number, wide.dtype)


def _has_many_rows(shape: tuple[Any, ...]) -> bool:
    is_known = all(isinstance(size, int) for size in shape)  # symbolic sizes cannot be compared
    return is_known and math.prod(shape[:-1]) > _ONE_PASS


def _jvp(primals: Any, tangents: Any) -> Any:
    return unheld(*primals), tangents[0]


def _batch(args: Any, dims: Any) -> Any:
    return unheld(*args), dims[0]  # one is made of the other


unheld_p.def_impl(_wide)
unheld_p.def_abstract_eval(_wide)
ad.primitive_jvps[unheld_p] = _jvp
batching.primitive_batchers[unheld_p] = _batch
mlir.register_lowering(unheld_p, mlir.lower_fun(_wide, multiple_results=False))
mlir.register_lowering(unheld_p, mlir.lower_fun(summand, multiple_results=False), platform="gpu")
