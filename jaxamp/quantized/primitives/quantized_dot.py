"""``quantized_dot`` primitive: a dot that quantizes its operands, with a derivative of its own.

Matrices have one form throughout: ``lhs`` is ``(*batch, M, K)``, ``rhs`` is ``(*batch, N, K)``, the
result ``(*batch, M, N)``. Blocks lie along the contracted axis ``K``.

The derivative treats rounding as the identity (straight-through estimator). Each operand's tangent
is multiplied by the other operand, quantized along the axis that the *transposed* product
contracts: these are the residuals. In the backward pass the cotangent is quantized too. A policy
may have backward products in bf16 instead.

See: Bengio, Léonard and Courville 2013, arXiv:1308.3432; Micikevicius et al. 2022,
arXiv:2209.05433, for FP8 formats in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import ad

from jaxamp.core import jax_compat
from jaxamp.core.define import define
from jaxamp.quantized.choices.scaled import Scaled
from jaxamp.quantized.lowp import ScaledArray, dequantize
from jaxamp.quantized.primitives.matrices import (
    as_matrices,
    batch_first,
    dot_words,
    merge_rows,
    product_batch,
    product_type,
    split_rows,
)
from jaxamp.quantized.primitives.quantize_primitive import quantize
from jaxamp.quantized.primitives.quantized_product import BF16, dot, product
from jaxamp.rewrite.registry import RuleContext

quantized_dot_p = Primitive("quantized_dot")
quantized_linear_p = Primitive("quantized_linear")

SCOPE = "jaxamp_scaled"  # the scope of all equations that a quantized dot becomes


def quantized_dot(lhs: Any, rhs: Any, how: Scaled, dimension_numbers: Any, dtype: Any) -> jax.Array:
    """Compute ``lax.dot_general`` of narrow floats that are quantized first."""
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dimension_numbers
    with jax.named_scope(SCOPE):
        left, left_free = as_matrices(lhs, lhs_sum, lhs_batch)
        right, right_free = as_matrices(rhs, rhs_sum, rhs_batch)
        batch = tuple(lhs.shape[axis] for axis in lhs_batch)
        out = quantized_dot_p.bind(left, right, how=how, dtype=dtype)
        return lax.reshape(out, (*batch, *left_free, *right_free))


def emit_quantized(context: RuleContext, lhs: Any, rhs: Any) -> Sequence[Any]:
    """Emit a dot that is quantized as its form says."""
    decision = context.decision
    assert isinstance(decision.plan.form, Scaled)
    stored = decision.outputs[0] or decision.operands[0]
    assert stored is not None
    numbers = context.eqn.params["dimension_numbers"]
    return [quantized_dot(lhs, rhs, decision.plan.form, numbers, stored.dtype)]


def _quantized(lhs: Any, rhs: Any, *, how: Scaled, dtype: Any) -> jax.Array:
    left, right = map(quantize, (lhs, rhs), how.casts)
    return product(left, right, dtype)


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
        narrow_lhs, narrow_rhs = map(quantize, primals, how.casts)
        out = product(narrow_lhs, narrow_rhs, dtype)
        linear = partial(quantized_linear, how=how, dtype=dtype)

        def left(tangent: Any) -> Any:
            return linear(tangent, _transposed(rhs, narrow_rhs))

        def right(tangent: Any) -> Any:
            return linear(tangent, _transposed(lhs, narrow_lhs)).mT

    pairs = zip((left, right), tangents, strict=True)
    terms = [term(tangent) for term, tangent in pairs if not isinstance(tangent, ad.Zero)]
    return out, reduce(ad.add_tangents, terms, jax_compat.symbolic_zero_like(out))


def _transpose(cotangent: Any, lhs: Any, rhs: Any, *, how: Scaled, dtype: Any) -> Sequence[Any]:
    is_left = ad.is_undefined_primal(lhs)
    known, cast, aval = (rhs, how.casts[1], lhs.aval) if is_left else (lhs, how.casts[0], rhs.aval)
    ct = cotangent if is_left else cotangent.mT
    if how.gradient is None:
        back = dot(ct.astype(known.dtype), known.mT, aval.dtype)
    else:
        transposed = _transposed(known, quantize(known, cast))
        back = product(quantize(ct, how.gradient), transposed, aval.dtype)
    return [back, None] if is_left else [None, back]


def _transposed(x: Any, narrow: ScaledArray) -> ScaledArray:
    """Return the transposed matrix, quantized along its new last axis."""
    cast = narrow.cast
    if cast.sf_block is None:
        return replace(narrow, values=narrow.values.mT)
    if cast.sf_block[0] == cast.sf_block[1] and not isinstance(narrow.scale, ScaledArray):
        return replace(narrow, values=narrow.values.mT, scale=narrow.scale.mT)
    return quantize(x.mT, cast)


define(quantized_dot_p, _quantized, product_type, product_batch(quantized_dot_p), _jvp)
ad.primitive_transposes[quantized_dot_p] = _transpose
jax_compat.check_nans(quantized_dot_p, lambda params: dot_general_p.name)


def quantized_linear(tangent: Any, known: ScaledArray, how: Scaled, dtype: Any) -> jax.Array:
    """Compute ``tangent @ known``, linear in the array, in bf16: the tangent of a quantized dot.

    Its transpose quantizes the cotangent and multiplies it by ``known``, which is the residual.
    """
    leaves, tree = jax.tree.flatten(known)
    return quantized_linear_p.bind(tangent, *leaves, tree=tree, how=how, dtype=dtype)


def _linear_direct(tangent: Any, *leaves: Any, tree: Any, dtype: Any, **_: Any) -> jax.Array:
    known = dequantize(jax.tree.unflatten(tree, leaves), BF16)
    return dot(tangent.astype(BF16), known.mT, dtype)


def _linear_type(tangent: Any, values: Any, *scales: Any, dtype: Any, **_: Any) -> Any:
    """Infer the type of a dot with the known values transposed; only their shape counts."""
    known = values.update(dtype=tangent.dtype)
    return dot_general_p.abstract_eval(tangent, known, **dot_words(tangent, dtype, -2))[0]


def _linear_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    out = quantized_linear_p.bind(*primals, **params)
    if isinstance(tangents[0], ad.Zero):
        return out, jax_compat.symbolic_zero_like(out)
    return out, quantized_linear_p.bind(tangents[0], *primals[1:], **params)


def _linear_transpose(
    cotangent: Any, tangent: Any, *leaves: Any, tree: Any, how: Scaled, **_: Any
) -> Sequence[Any]:
    known = jax.tree.unflatten(tree, leaves)
    assert how.gradient is not None
    back = product(quantize(cotangent, how.gradient), known, tangent.aval.dtype)
    return [back, *[None] * len(leaves)]


def _linear_batch(
    operands: Sequence[Any], axes: Sequence[Any], **params: Any
) -> tuple[jax.Array, int]:
    tangent, *leaves = map(batch_first, operands, axes)
    if all(axis is None for axis in axes[1:]):
        out = quantized_linear_p.bind(merge_rows(tangent), *leaves, **params)
        return split_rows(out, tangent.shape[0]), 0
    if axes[0] is None:
        tangent = jnp.broadcast_to(tangent, (leaves[0].shape[0], *tangent.shape))
    return quantized_linear_p.bind(tangent, *leaves, **params), 0


define(quantized_linear_p, _linear_direct, _linear_type, _linear_batch, _linear_jvp)
ad.primitive_transposes[quantized_linear_p] = _linear_transpose
