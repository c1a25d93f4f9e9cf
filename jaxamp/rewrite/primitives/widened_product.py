"""The product of quantized matrices by widened ones, of which XLA may make a product of 8 bits.

See: https://github.com/openxla/xla/issues/17887 for the form that XLA:GPU makes an FP8 product of.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import dot_general_p

from jaxamp.lowp import ScaledArray, dequantize
from jaxamp.lowp.scaled_array import factors, spread_scale
from jaxamp.rewrite.primitives.accumulate import accumulate

BF16 = np.dtype(jnp.bfloat16)
F32 = np.dtype(np.float32)


def widened_product(lhs: ScaledArray, rhs: ScaledArray, dtype: Any) -> jax.Array:
    """Compute ``lhs @ rhs.T`` of (stacks of) matrices, accumulated in float32.

    The operands are widened to bf16 and multiplied by their scales before the dot. That is exact
    where scales are powers of two, and with one scale for each operand it is the form that XLA
    turns into cuBLASLt's FP8 kernel. A scale that is no power of two is applied after the dot, as
    bf16 would round it, and so are scales of whole rows, with which XLA would find no FP8 product.

    Args:
      lhs: of shape ``(*batch, M, K)``, its blocks along ``K``.
      rhs: of shape ``(*batch, N, K)``, its blocks along ``K``.
      dtype: of the result.

    Returns:
      Shape ``(*batch, M, N)``.
    """
    if lhs.cast.sf_block is not None or rhs.cast.sf_block is not None:
        # Without a barrier XLA would remove the rounding to 8 bits where one kernel computes both:
        # https://github.com/openxla/xla/issues/41605
        lhs, rhs = lax.optimization_barrier((lhs, rhs))
        if is_scaled_by_row(lhs) and is_scaled_by_row(rhs):
            out = dot(lhs.values.astype(BF16), rhs.values.astype(BF16), F32)
            return (out * factors(lhs) * factors(rhs).mT).astype(dtype)
        return dot(dequantize(lhs, BF16), dequantize(rhs, BF16), dtype)
    wide_lhs, left = _widened(lhs)
    wide_rhs, right = _widened(rhs)
    out = dot(wide_lhs, wide_rhs, dtype)
    for scale in (left, right):
        if scale is not None:
            out = out.astype(F32) * scale
    return out.astype(dtype)


def is_scaled_by_row(x: ScaledArray) -> bool:
    """Return whether each row along ``K`` has one scale, so that the result can be scaled."""
    block = x.cast.sf_block
    return block is not None and block[0] == 1 and block[1] >= x.shape[-1]


def _widened(x: ScaledArray) -> tuple[jax.Array, jax.Array | None]:
    """Return values in bf16, scaled where that is exact, and the scale that is left."""
    values, scale = x.values.astype(BF16), spread_scale(x)
    return (values * scale.astype(BF16), None) if x.cast.round_sf else (values, scale)


def dot(lhs: jax.Array, rhs: jax.Array, dtype: Any) -> jax.Array:
    """Compute ``lhs @ rhs.T`` in one narrow dtype, rounded once or, in f32, not at all."""
    batch = tuple(range(lhs.ndim - 2))
    axes = ((lhs.ndim - 1,), (rhs.ndim - 1,)), (batch, batch)
    if dtype == F32:
        template = {"dimension_numbers": axes, "precision": None, "out_sharding": None}
        return accumulate(dot_general_p, (lhs, rhs), template, lhs.dtype)
    return lax.dot_general(lhs, rhs, axes, preferred_element_type=dtype)
