"""The product of two quantized matrices, the one place that knows how it is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from jaxamp.kernels.cudnn_block_product import takes
from jaxamp.lowp import ScaledArray
from jaxamp.rewrite.primitives.block_product import block_product
from jaxamp.rewrite.primitives.widened_product import is_scaled_by_row, widened_product

if TYPE_CHECKING:
    from jaxamp.kernels.config import KernelConfig

PRODUCT = "jaxamp_product"  # the scope of a product of quantized operands


def product(
    lhs: ScaledArray, rhs: ScaledArray, dtype: Any, kernel: KernelConfig | None = None
) -> jax.Array:
    """Compute ``lhs @ rhs.T`` of (stacks of) matrices, accumulated in float32.

    Args:
      lhs: of shape ``(*batch, M, K)``, its blocks along ``K``.
      rhs: of shape ``(*batch, N, K)``, its blocks along ``K``.
      dtype: of the result.
      kernel: how ``block_scaled_matmul`` is compiled, which then takes what lies in blocks of 8
        bits; ``None`` for the dot alone.

    Returns:
      Shape ``(*batch, M, N)``.
    """
    with jax.named_scope(PRODUCT):
        if kernel is not None and _width(lhs) == _width(rhs) is not None:
            from jaxamp.kernels.block_scaled_matmul import block_scaled_matmul  # Pallas: slow

            return block_scaled_matmul(lhs, rhs, out_dtype=dtype, config=kernel)
        by_rows = is_scaled_by_row(lhs) and is_scaled_by_row(rhs)
        if takes(lhs, rhs) and not by_rows:
            return block_product(lhs, rhs, dtype)
        return widened_product(lhs, rhs, dtype)


def _width(x: ScaledArray) -> int | None:
    """Return the length of the blocks of 8-bit values, if there are any."""
    block = x.cast.sf_block
    return block[1] if block and x.cast.out_dtype.bits == 8 else None
