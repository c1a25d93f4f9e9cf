"""``rounding_barrier`` primitive: a barrier behind a rounding, so that XLA does not remove it.

XLA removes a narrowing that a widening follows, and reads the float32 value. A barrier between the
two prevents that, and separates their kernels. On a GPU that is what is wanted, as XLA would store
the wide value beside the narrow one. XLA:TPU fuses what follows a product into its kernel, sums
among it: there a rounding to bfloat16 is repeated as `reduce_precision`, which XLA keeps and fuses.
JAX keeps residuals of a checkpoint in this way.

See: https://github.com/openxla/xla/issues/41605 and https://github.com/jax-ml/jax/pull/22244
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from jaxamp.core.define import define
from jaxamp.core.kept_rounding import reduce_to
from jaxamp.core.taxonomy import OpKind, Trait

rounding_barrier_p = Primitive("rounding_barrier")


def rounding_barrier(value: Any) -> Any:
    """Return a value of a narrow dtype whose rounding a later widening does not undo."""
    return rounding_barrier_p.bind(value)


def _rounded(value: Any) -> Any:
    reduced = reduce_to(value, value.dtype)
    return lax.optimization_barrier(value) if reduced is None else reduced


def _taylor(primals: Sequence[Any], series: Sequence[Sequence[Any]]) -> Any:
    return rounding_barrier(*primals), [rounding_barrier(term) for term in series[0]]


define(
    rounding_barrier_p,
    lambda value: value,
    lambda value: value,
    lambda args, dims: (rounding_barrier(*args), *dims),
    lowered={None: lax.optimization_barrier, "tpu": _rounded},
    kind=OpKind.DATA_MOVEMENT,
    trait=Trait.SHAPE,
    taylor=_taylor,
)
ad.deflinear2(rounding_barrier_p, lambda cotangent, value: [rounding_barrier(cotangent)])
