"""A dot of operands that are quantized on their way in, as a primitive with its own derivative.

Matrices are in one form throughout: ``lhs`` is ``(*batch, M, K)``, ``rhs`` is ``(*batch, N, K)``,
the result ``(*batch, M, N)``. What is quantized lies along the axis that is summed over, so that
blocks do.

The derivative treats rounding as the identity. Each operand's tangent meets the other operand,
quantized along the axis that the *transposed* product sums over: that is what the backward pass
keeps. There the cotangent is quantized too. A policy may have backward products in bf16 instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import ad, batching, mlir

from jaxamp import _compat
from jaxamp.errors import RewriteError
from jaxamp.formats import CastConfig
from jaxamp.lowp import ScaledArray, dequantize, quantize
from jaxamp.plan import Scaled
from jaxamp.rewrite.product import BF16, dot, product
from jaxamp.taxonomy import OpKind, Trait, register_op_kind

quantized_dot_p = Primitive("quantized_dot")
quantized_linear_p = Primitive("quantized_linear")
quantize_p = Primitive("quantize")
quantize_p.multiple_results = True


SCOPE = "jaxamp_scaled"  # the name around all that becomes of a quantized dot


def quantized_dot(lhs: Any, rhs: Any, how: Scaled, dimension_numbers: Any, dtype: Any) -> jax.Array:
    """``lax.dot_general`` with quantized operands.

    Args:
      lhs: narrow floats.
      rhs: of the same dtype.
      how: the casts of both operands, and of cotangents.
      dimension_numbers: of the ``dot_general``.
      dtype: of the result.
    """
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dimension_numbers
    with jax.named_scope(SCOPE):
        left, left_free = _as_matrices(lhs, lhs_sum, lhs_batch)
        right, right_free = _as_matrices(rhs, rhs_sum, rhs_batch)
        batch = tuple(lhs.shape[axis] for axis in lhs_batch)
        out = quantized_dot_p.bind(left, right, how=how, dtype=dtype)
        return lax.reshape(out, (*batch, *left_free, *right_free))


def _as_matrices(
    x: Any, summed: Sequence[int], batch: Sequence[int]
) -> tuple[jax.Array, tuple[int, ...]]:
    """An operand as a stack of matrices whose last axis is summed over, and its free axes."""
    free = [axis for axis in range(x.ndim) if axis not in (*summed, *batch)]
    shape = [tuple(x.shape[axis] for axis in axes) for axes in (batch, free, summed)]
    order = (*batch, *free, *summed)
    moved = x if order == tuple(range(x.ndim)) else lax.transpose(x, order)
    matrices = (*shape[0], math.prod(shape[1]), math.prod(shape[2]))
    return (moved if moved.shape == matrices else lax.reshape(moved, matrices)), shape[1]


def _quantize(x: Any, cast: CastConfig) -> ScaledArray:
    """``quantize`` as one equation; under vmap the batch shares a scale for the whole tensor."""
    return jax.tree.unflatten(_structure(jax.typeof(x), cast)[1], quantize_p.bind(x, cast=cast))


@lru_cache(maxsize=1024)
def _structure(aval: Any, cast: CastConfig) -> tuple[Any, Any]:
    """Types and tree of a quantized array."""
    made = jax.make_jaxpr(lambda x: quantize(x, cast), return_shape=True)(aval)
    return made[0].out_avals, jax.tree.structure(made[1])


def _refuse(*_: Any, **__: Any) -> Any:
    raise RewriteError(
        "The backward pass of a scaled dot rounds what it reads, and rounding has no derivative: "
        "such a dot is differentiated once. For higher derivatives keep backward products in bf16: "
        "policy.replace(scaling={'backward': False}).",
        primitive="quantize",
    )


def _batch_quantize(
    operands: Sequence[Any], axes: Sequence[Any], *, cast: CastConfig
) -> tuple[Sequence[Any], Sequence[Any]]:
    leaves = quantize_p.bind(jnp.moveaxis(operands[0], axes[0], 0), cast=cast)
    return leaves, [0 if leaf.ndim else None for leaf in leaves]


def _quantized(lhs: Any, rhs: Any, *, how: Scaled, dtype: Any) -> jax.Array:
    left, right = map(_quantize, (lhs, rhs), how.casts)
    return product(left, right, dtype, how.kernel)


def _type(lhs: Any, rhs: Any, *, dtype: Any, **_: Any) -> Any:
    batch = tuple(range(lhs.ndim - 2))
    axes = ((lhs.ndim - 1,), (rhs.ndim - 1,)), (batch, batch)
    return dot_general_p.abstract_eval(
        lhs,
        rhs,
        dimension_numbers=axes,
        precision=None,
        preferred_element_type=dtype,
        out_sharding=None,
    )[0]


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, how: Scaled, dtype: Any
) -> tuple[Any, Any]:
    lhs, rhs = primals
    if how.gradient is None:
        out = quantized_dot_p.bind(lhs, rhs, how=how, dtype=dtype)

        def left(tangent: Any) -> Any:
            return dot(tangent, rhs, dtype)

        def right(tangent: Any) -> Any:
            return dot(lhs, tangent, dtype)

    else:
        narrow_lhs, narrow_rhs = map(_quantize, primals, how.casts)
        out = product(narrow_lhs, narrow_rhs, dtype, how.kernel)
        linear = partial(_linear, how=how, dtype=dtype)

        def left(tangent: Any) -> Any:
            return linear(tangent, _turned(rhs, narrow_rhs))

        def right(tangent: Any) -> Any:
            return _swap(linear(tangent, _turned(lhs, narrow_lhs)))

    pairs = zip((left, right), tangents, strict=True)
    terms = [term(tangent) for term, tangent in pairs if not isinstance(tangent, ad.Zero)]
    return out, sum(terms[1:], terms[0]) if terms else _compat.symbolic_zero_like(out)


def _transpose(cotangent: Any, lhs: Any, rhs: Any, *, how: Scaled, dtype: Any) -> Sequence[Any]:
    """Of the dot as a function of one operand."""
    is_left = ad.is_undefined_primal(lhs)
    known, cast, aval = (rhs, how.casts[1], lhs.aval) if is_left else (lhs, how.casts[0], rhs.aval)
    ct = cotangent if is_left else _swap(cotangent)
    if how.gradient is None:
        back = dot(ct.astype(known.dtype), _swap(known), aval.dtype)
    else:
        turned = _turned(known, _quantize(known, cast))
        back = product(_quantize(ct, how.gradient), turned, aval.dtype, how.kernel)
    return [back, None] if is_left else [None, back]


def _turned(x: Any, narrow: ScaledArray) -> ScaledArray:
    """The transposed matrix, quantized along its new last axis."""
    cast = narrow.cast
    if cast.sf_block is None:
        return replace(narrow, values=_swap(narrow.values))
    if cast.sf_block[0] == cast.sf_block[1] and not isinstance(narrow.scale, ScaledArray):
        return replace(narrow, values=_swap(narrow.values), scale=_swap(narrow.scale))
    return _quantize(_swap(x), cast)


def _swap(x: Any) -> Any:
    *batch, rows, cols = range(x.ndim)
    return lax.transpose(x, (*batch, cols, rows))


def _linear(tangent: Any, known: ScaledArray, how: Scaled, dtype: Any) -> jax.Array:
    """``tangent @ known``, whose transpose multiplies quantized cotangents with ``known``."""
    leaves, tree = jax.tree.flatten(known)
    return quantized_linear_p.bind(tangent, *leaves, tree=tree, how=how, dtype=dtype)


def _linear_direct(tangent: Any, *leaves: Any, tree: Any, dtype: Any, **_: Any) -> jax.Array:
    known = dequantize(jax.tree.unflatten(tree, leaves), BF16)
    return dot(tangent.astype(BF16), _swap(known), dtype)


def _linear_type(tangent: Any, values: Any, *scales: Any, dtype: Any, **_: Any) -> Any:
    """Of a dot with the known values transposed; only their shape counts."""
    batch = tuple(range(tangent.ndim - 2))
    return dot_general_p.abstract_eval(
        tangent,
        values.update(dtype=tangent.dtype),
        dimension_numbers=(((tangent.ndim - 1,), (values.ndim - 2,)), (batch, batch)),
        precision=None,
        preferred_element_type=dtype,
        out_sharding=None,
    )[0]


def _linear_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """Linear in the tangent; what is quantized has no derivative."""
    out = quantized_linear_p.bind(*primals, **params)
    if isinstance(tangents[0], ad.Zero):
        return out, _compat.symbolic_zero_like(out)
    return out, quantized_linear_p.bind(tangents[0], *primals[1:], **params)


def _linear_transpose(
    cotangent: Any, tangent: Any, *leaves: Any, tree: Any, how: Scaled, **_: Any
) -> Sequence[Any]:
    known = jax.tree.unflatten(tree, leaves)
    assert how.gradient is not None
    back = product(_quantize(cotangent, how.gradient), known, tangent.aval.dtype, how.kernel)
    return [back, *[None] * len(leaves)]


def _batch_dot(
    operands: Sequence[Any], axes: Sequence[Any], **params: Any
) -> tuple[jax.Array, int]:
    """Where one operand is shared by the batch, the other's rows are put below each other."""
    lhs, rhs = map(_batch_first, operands, axes)
    if axes[0] is not None and axes[1] is not None:
        return quantized_dot_p.bind(lhs, rhs, **params), 0
    if axes[1] is None:
        return _rows_apart(
            quantized_dot_p.bind(_rows_together(lhs), rhs, **params), lhs.shape[0]
        ), 0
    out = _swap(quantized_dot_p.bind(lhs, _rows_together(rhs), **params))
    return _swap(_rows_apart(out, rhs.shape[0])), 0


def _batch_linear(
    operands: Sequence[Any], axes: Sequence[Any], **params: Any
) -> tuple[jax.Array, int]:
    tangent, *leaves = map(_batch_first, operands, axes)
    if all(axis is None for axis in axes[1:]):
        out = quantized_linear_p.bind(_rows_together(tangent), *leaves, **params)
        return _rows_apart(out, tangent.shape[0]), 0
    if axes[0] is None:
        tangent = jnp.broadcast_to(tangent, (leaves[0].shape[0], *tangent.shape))
    return quantized_linear_p.bind(tangent, *leaves, **params), 0


def _batch_first(x: Any, axis: Any) -> Any:
    return x if axis is None else jnp.moveaxis(x, axis, 0)


def _rows_together(x: Any) -> Any:
    """From ``(V, *batch, rows, K)`` to ``(*batch, V * rows, K)``."""
    apart = jnp.moveaxis(x, 0, -3)
    return apart.reshape(*apart.shape[:-3], apart.shape[-3] * apart.shape[-2], apart.shape[-1])


def _rows_apart(x: Any, count: int) -> Any:
    """Back from ``(*batch, V * rows, N)`` to ``(V, *batch, rows, N)``."""
    apart = x.reshape(*x.shape[:-2], count, x.shape[-2] // count, x.shape[-1])
    return jnp.moveaxis(apart, -3, 0)


def _leaves(x: Any, *, cast: CastConfig) -> Sequence[Any]:
    return jax.tree.leaves(quantize(x, cast))


def _register(primitive: Primitive, direct: Any, typed: Any, jvp: Any, batch: Any) -> None:
    params = {"multiple_results": primitive.multiple_results}
    primitive.def_impl(direct)
    primitive.def_abstract_eval(typed)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(direct, **params))
    register_op_kind(primitive, OpKind.BOUNDARY, trait=Trait.OPAQUE)


def _quantize_type(x: Any, *, cast: CastConfig) -> Any:
    return _structure(x, cast)[0]


_register(quantize_p, _leaves, _quantize_type, _refuse, _batch_quantize)
_register(quantized_dot_p, _quantized, _type, _jvp, _batch_dot)
_register(quantized_linear_p, _linear_direct, _linear_type, _linear_jvp, _batch_linear)
ad.primitive_transposes[quantized_dot_p] = _transpose
ad.primitive_transposes[quantized_linear_p] = _linear_transpose
