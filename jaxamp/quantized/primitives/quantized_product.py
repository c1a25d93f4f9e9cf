"""The product of two quantized matrices, the one place that knows how it is computed.

Where each operand has one scale, or one for each row, the dot multiplies the 8 bits themselves and
the scales multiply its result: there is nothing that XLA could widen. Its default options take a
rounding to 8 bits away that is widened before the dot, and multiply in bf16 (JAX 0.10.2, 0.11.2).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxamp.core.formats import Precision
from jaxamp.quantized.lowp import ScaledArray
from jaxamp.quantized.lowp.block_layout import scales_result
from jaxamp.quantized.lowp.scaled_array import factors, spread_scale
from jaxamp.quantized.primitives.block_product import block_product, takes
from jaxamp.quantized.primitives.f8_dot import f8_dot
from jaxamp.quantized.primitives.widened_product import BF16, F32, widened_product

PRODUCT = "jaxamp_product"  # the scope of a product of quantized operands


def product(lhs: ScaledArray, rhs: ScaledArray, dtype: Any) -> jax.Array:
    """Compute ``lhs @ rhs.T`` of (stacks of) matrices, accumulated in float32.

    Args:
      lhs: of shape ``(*batch, M, K)``, its blocks along ``K``.
      rhs: of shape ``(*batch, N, K)``, its blocks along ``K``.
      dtype: of the result.

    Returns:
      Shape ``(*batch, M, N)``.
    """
    with jax.named_scope(PRODUCT):
        if all(scales_result(x.cast, x.shape[-1]) for x in (lhs, rhs)):
            return _scaled_result(lhs, rhs, np.dtype(dtype))
        if takes(lhs, rhs):
            return block_product(lhs, rhs, dtype)
        return widened_product(lhs, rhs, dtype)


def _scaled_result(lhs: ScaledArray, rhs: ScaledArray, dtype: np.dtype) -> jax.Array:
    """Multiply the values, and the result by both scales in the dtype of the accumulator.

    A power of two leaves a bf16 number's mantissa as it is, so there the dot rounds to bf16: then
    cuBLASLt's kernel scales and rounds as well, and Triton's does in any case.
    """
    is_exact = lhs.cast.round_sf and rhs.cast.round_sf and dtype == BF16
    accumulated = BF16 if is_exact else F32
    scale = _by_row(lhs) * _by_row(rhs).mT
    out = f8_dot(_in_8_bits(lhs), _in_8_bits(rhs), accumulated)
    return (out * scale.astype(accumulated)).astype(dtype)


def _by_row(x: ScaledArray) -> jax.Array:
    """Return the scales in float32, of shape ``(*batch, rows, 1)``, ones for what shares one."""
    return spread_scale(x) if x.cast.sf_block is None else factors(x)


def _in_8_bits(x: ScaledArray) -> jax.Array:
    """Return the values; those of 4 bits exactly in 8, as no dot takes them with a scale apart."""
    return x.values.astype(Precision.F8_E4M3.dtype) if x.cast.out_dtype.bits < 8 else x.values
