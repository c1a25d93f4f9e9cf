"""``rounded_cotangent`` primitive: a sum whose transpose rounds the cotangent for both operands.

The sum of an activation that is stored narrow and a broadcast parameter has one cotangent for both.
The activation's is rounded, the parameter's is summed over rows. Rounded before the two part, both
are computed from what is in memory.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching

from jaxamp.core import jax_compat
from jaxamp.core.define import define
from jaxamp.plan.decision import CotangentRounding
from jaxamp.xla.primitives.rounding_barrier import rounding_barrier, unbarriered

rounded_cotangent_p = Primitive("rounded_cotangent")


def sum_with_rounded_cotangent(eqn: JaxprEqn, operands: Any, of: CotangentRounding) -> Any:
    """Add or subtract two arrays, as an equation does; the cotangent of the result is rounded."""
    rank = max(map(np.ndim, operands))
    aligned = [lax.expand_dims(x, range(rank - np.ndim(x))) for x in operands]  # scalars, too
    return rounded_cotangent_p.bind(*aligned, op=eqn.primitive, of=of)


def _sum(x: Any, y: Any, *, op: Primitive, of: CotangentRounding) -> Any:
    return op.bind(x, y)


def _aval(x: Any, y: Any, *, op: Primitive, of: CotangentRounding) -> Any:
    aval, _ = op.abstract_eval(x, y)
    return aval


def _transpose(cotangent: Any, *operands: Any, op: Primitive, of: CotangentRounding) -> Any:
    if type(cotangent) is ad.Zero:
        return [None, None]
    given = _rounded(cotangent, of)
    found = [_summed(g, x.aval.shape) for g, x in zip(given, operands, strict=True)]
    return [found[0], lax.neg(found[1])] if op.name == "sub" else found


def _rounded(cotangent: Any, of: CotangentRounding) -> list[Any]:
    """Return the rounded cotangent for each operand."""
    if cotangent.dtype == of.precision.dtype:
        return [cotangent, cotangent]  # a bias that a convolution's kernel adds
    narrow = rounding_barrier(lax.convert_element_type(cotangent, of.precision.dtype))
    rounded = lax.convert_element_type(narrow, cotangent.dtype)
    summed = rounded if of.is_multiplied else unbarriered(rounded)
    return [rounded if place == of.activation else summed for place in (0, 1)]


def _summed(cotangent: Any, shape: tuple[int, ...]) -> Any:
    """Sum a cotangent over the axes that its operand was broadcast along, in f32."""
    axes = [i for i, (n, size) in enumerate(zip(cotangent.shape, shape, strict=True)) if n != size]
    if not axes:
        return cotangent
    total = lax.reduce_sum(lax.convert_element_type(cotangent, jnp.float32), axes)
    return lax.convert_element_type(lax.reshape(total, shape), cotangent.dtype)


def _batch(operands: Any, dims: Any, *, op: Primitive, of: CotangentRounding) -> Any:
    in_front = [batching.bdim_at_front(x, dim, 1) for x, dim in zip(operands, dims, strict=True)]
    return rounded_cotangent_p.bind(*in_front, op=op, of=of), 0


def _taylor(primals: Any, series: Any, **params: Any) -> Any:
    terms = [rounded_cotangent_p.bind(x, y, **params) for x, y in zip(*series, strict=True)]
    return rounded_cotangent_p.bind(*primals, **params), terms


define(rounded_cotangent_p, _sum, _aval, _batch, taylor=_taylor)
ad.deflinear2(rounded_cotangent_p, _transpose)
jax_compat.check_nans(rounded_cotangent_p, lambda params: params["op"].name)
