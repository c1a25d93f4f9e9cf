"""Primitives of roundings that XLA is to keep: barriers behind them, and reads from before these.

XLA removes a narrowing that a widening follows, and reads the float32 value. A barrier between the
two prevents that, and separates their kernels. On a GPU that is what is wanted, as XLA would store
the wide value beside the narrow one. XLA:TPU fuses what follows a product into its kernel, sums
among it: there a rounding to bfloat16 is repeated as `reduce_precision`, which XLA keeps and fuses.
JAX keeps residuals of a checkpoint in this way.

XLA:GPU fuses nothing across a barrier, not even a sum with what computes its summands. What is
``unbarriered`` is read from before it. The rounding still counts: instead of the barrier, a select
between NaN and number stands between it and the widening, so that XLA does not recognize the pair.
Products read from behind it: Triton takes no select into their kernels, and would read a copy. The
cotangent of such a value has a barrier on a GPU only if a sum made the value, which hands it on to
several kernels. Of all else the backward pass is one kernel, which adds up what it reads.

See: https://github.com/openxla/xla/issues/41605 and https://github.com/jax-ml/jax/pull/22244
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from jaxamp.core import jax_compat
from jaxamp.core.define import define
from jaxamp.core.kept_rounding import reduce_to
from jaxamp.core.taxonomy import OpKind, Trait
from jaxamp.plan.decision import CotangentRounding

rounding_barrier_p = Primitive("rounding_barrier")


def rounding_barrier(value: Any, of_sum: bool = True, kept: bool = True) -> Any:
    """Return a value of a narrow dtype whose rounding a later widening does not undo."""
    return rounding_barrier_p.bind(value, of_sum=of_sum, kept=kept)


def _same(value: Any, **_: Any) -> Any:
    return value


def _on_gpu(value: Any, *, kept: bool, **_: Any) -> Any:
    return lax.optimization_barrier(value) if kept else value


def _on_tpu(value: Any, **_: Any) -> Any:
    reduced = reduce_to(value, value.dtype)
    return lax.optimization_barrier(value) if reduced is None else reduced


define(
    rounding_barrier_p,
    _same,
    _same,
    lambda args, dims, **params: (rounding_barrier(*args, **params), *dims),
    lowered={
        None: lambda x, **_: lax.optimization_barrier(x),
        "cuda": _on_gpu,
        "rocm": _on_gpu,
        "tpu": _on_tpu,
    },
    kind=OpKind.DATA_MOVEMENT,
    trait=Trait.SAME,
)
ad.deflinear2(rounding_barrier_p, lambda g, _, of_sum, kept: [rounding_barrier(g, of_sum, of_sum)])


unbarriered_p = Primitive("unbarriered")

_ONE_PASS = 4096
"""XLA:GPU sums up to this many rows in one pass, by a kernel of its own.

`ReductionDimensionRaceFreeBound` in `xla/service/gpu/reduction_utils.cc`: 32 × 128.
"""


def unbarriered(wide: Any) -> Any:
    """Return a widened value, read from before its barrier where that is cheaper.

    A recomputed value, which has no barrier of its own, is read as it is.
    """
    return unbarriered_p.bind(wide)


def widened(rounded: Any, dtype: Any) -> Any:
    """Widen a rounded value in a form in which XLA does not remove the rounding."""
    number = lax.select(lax.eq(rounded, rounded), rounded, lax.full_like(rounded, np.nan))
    return lax.convert_element_type(number, dtype)


def _has_many_rows(shape: tuple[Any, ...]) -> bool:
    is_known = all(isinstance(size, int) for size in shape)  # symbolic sizes cannot be compared
    return is_known and math.prod(shape[:-1]) > _ONE_PASS


def _lowered(context: Any, wide: Any) -> Any:
    (aval,) = context.avals_in
    is_cheaper = jax_compat.is_for_gpu(context) and _has_many_rows(aval.shape)
    found = jax_compat.before_barrier(wide) if is_cheaper else None
    if found is None:
        return [wide]
    rounded, dtype = found
    lower = mlir.lower_fun(lambda x: widened(x, aval.dtype), multiple_results=False)
    return lower(context.replace(avals_in=[aval.update(dtype=dtype, weak_type=False)]), rounded)


define(
    unbarriered_p,
    _same,
    _same,
    lambda args, dims: (unbarriered(*args), *dims),
    lowered={},
    kind=OpKind.DATA_MOVEMENT,
    trait=Trait.SAME,
)
ad.deflinear2(unbarriered_p, lambda cotangent, wide: [cotangent])
mlir.register_lowering(
    unbarriered_p, _lowered, cacheable=False
)  # cached, it would be a function that cannot see what computes its operand


rounded_cotangent_p = Primitive("rounded_cotangent")


def with_rounded_cotangent(eqn: JaxprEqn, operands: Any, of: CotangentRounding) -> Any:
    """Add, subtract or multiply, as an equation does; the cotangent of the result is rounded.

    That of a product is rounded behind it: its rule of derivatives is JAX's own.
    """
    if eqn.primitive.name == "mul":
        return rounded_cotangent_p.bind(jax_compat.bind(eqn, operands)[0], op=eqn.primitive, of=of)
    rank = max(map(np.ndim, operands))
    aligned = [
        x if np.ndim(x) == rank else lax.expand_dims(x, range(rank - np.ndim(x))) for x in operands
    ]  # scalars, too
    return rounded_cotangent_p.bind(*aligned, op=eqn.primitive, of=of)


def _sum(x: Any, *others: Any, op: Primitive, of: CotangentRounding) -> Any:
    return op.bind(x, *others) if others else x


def _aval(x: Any, *others: Any, op: Primitive, of: CotangentRounding) -> Any:
    return op.abstract_eval(x, *others)[0] if others else x


def _transpose(cotangent: Any, *operands: Any, op: Primitive, of: CotangentRounding) -> Any:
    if type(cotangent) is ad.Zero:
        return [None for _ in operands]
    given = _given(cotangent, of)[: len(operands)]  # a product is one
    found = [_summed(g, x.aval) for g, x in zip(given, operands, strict=True)]
    return [found[0], lax.neg(found[1])] if op.name == "sub" else found


def _given(cotangent: Any, of: CotangentRounding) -> list[Any]:
    """Return the rounded cotangent for each operand."""
    if cotangent.dtype == of.precision.dtype:
        return [cotangent, cotangent]  # a bias that a convolution's kernel adds
    narrow = rounding_barrier(jax_compat.convert(cotangent, of.precision.dtype))
    rounded = jax_compat.convert(narrow, cotangent.dtype)
    return [rounded if place in of.held else unbarriered(rounded) for place in (0, 1)]


def _summed(cotangent: Any, aval: Any) -> Any:
    """Sum a cotangent over the axes that its operand was broadcast along, in f32, and lay it so."""
    axes = [i for i, size in enumerate(cotangent.shape) if size != aval.shape[i]]
    if not axes and jax.typeof(cotangent).sharding == aval.sharding:
        return cotangent
    total = lax.reduce_sum(jax_compat.convert(cotangent, jnp.float32), axes)
    placed = lax.reshape(total, aval.shape, out_sharding=aval.sharding)
    return jax_compat.convert(placed, cotangent.dtype)


def _batch(operands: Any, dims: Any, *, op: Primitive, of: CotangentRounding) -> Any:
    in_front = [batching.bdim_at_front(x, dim, 1) for x, dim in zip(operands, dims, strict=True)]
    return rounded_cotangent_p.bind(*in_front, op=op, of=of), 0


define(rounded_cotangent_p, _sum, _aval, _batch, kind=OpKind.ELEMENTWISE, trait=Trait.ROUNDED)
ad.deflinear2(rounded_cotangent_p, _transpose)
jax_compat.check_nans(rounded_cotangent_p, lambda params: params["op"].name)
