"""``quantized_linear`` primitive: a product of an array with a quantized one, linear in the array.

It is the tangent of a ``quantized_dot``, computed in bf16. Its transpose quantizes the cotangent
and multiplies it by the quantized operand, which is the residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import ad

from jaxamp.core import jax_compat
from jaxamp.core.define import define
from jaxamp.lowp import ScaledArray, dequantize
from jaxamp.plan import Scaled
from jaxamp.rewrite.primitives.matrices import batch_first, merge_rows, split_rows, swap
from jaxamp.rewrite.primitives.quantize_primitive import quantize
from jaxamp.rewrite.primitives.quantized_product import product
from jaxamp.rewrite.primitives.widened_product import BF16, dot

quantized_linear_p = Primitive("quantized_linear")


def quantized_linear(tangent: Any, known: ScaledArray, how: Scaled, dtype: Any) -> jax.Array:
    """Compute ``tangent @ known``; its transpose multiplies quantized cotangents with ``known``."""
    leaves, tree = jax.tree.flatten(known)
    return quantized_linear_p.bind(tangent, *leaves, tree=tree, how=how, dtype=dtype)


def _direct(tangent: Any, *leaves: Any, tree: Any, dtype: Any, **_: Any) -> jax.Array:
    known = dequantize(jax.tree.unflatten(tree, leaves), BF16)
    return dot(tangent.astype(BF16), swap(known), dtype)


def _type(tangent: Any, values: Any, *scales: Any, dtype: Any, **_: Any) -> Any:
    """Infer the type of a dot with the known values transposed; only their shape counts."""
    batch = tuple(range(tangent.ndim - 2))
    return dot_general_p.abstract_eval(
        tangent,
        values.update(dtype=tangent.dtype),
        dimension_numbers=(((tangent.ndim - 1,), (values.ndim - 2,)), (batch, batch)),
        precision=None,
        preferred_element_type=dtype,
        out_sharding=None,
    )[0]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """Apply linearity in the tangent; the quantized operand has no derivative."""
    out = quantized_linear_p.bind(*primals, **params)
    if isinstance(tangents[0], ad.Zero):
        return out, jax_compat.symbolic_zero_like(out)
    return out, quantized_linear_p.bind(tangents[0], *primals[1:], **params)


def _transpose(
    cotangent: Any, tangent: Any, *leaves: Any, tree: Any, how: Scaled, **_: Any
) -> Sequence[Any]:
    """Transpose the product in the array; the quantized operand has no cotangent."""
    known = jax.tree.unflatten(tree, leaves)
    assert how.gradient is not None
    back = product(quantize(cotangent, how.gradient), known, tangent.aval.dtype, how.kernel)
    return [back, *[None] * len(leaves)]


def _batch(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[jax.Array, int]:
    tangent, *leaves = map(batch_first, operands, axes)
    if all(axis is None for axis in axes[1:]):
        out = quantized_linear_p.bind(merge_rows(tangent), *leaves, **params)
        return split_rows(out, tangent.shape[0]), 0
    if axes[0] is None:
        tangent = jnp.broadcast_to(tangent, (leaves[0].shape[0], *tangent.shape))
    return quantized_linear_p.bind(tangent, *leaves, **params), 0


define(quantized_linear_p, _direct, _type, _batch, _jvp)
ad.primitive_transposes[quantized_linear_p] = _transpose
