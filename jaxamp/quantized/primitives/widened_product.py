"""The product of quantized matrices by widened ones, for blocks that nothing multiplies as such."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import dot_general_p

from jaxamp.quantized.lowp import ScaledArray, dequantize
from jaxamp.quantized.primitives.matrices import dot_words, matrix_axes
from jaxamp.rewrite.primitives.accumulate import accumulate

BF16 = np.dtype(jnp.bfloat16)
F32 = np.dtype(np.float32)


def widened_product(lhs: ScaledArray, rhs: ScaledArray, dtype: Any) -> jax.Array:
    """Compute ``lhs @ rhs.T`` of (stacks of) matrices in bf16, accumulated in float32."""
    # Without a barrier XLA would remove the rounding to 8 bits where one kernel computes both:
    # https://github.com/openxla/xla/issues/41605
    lhs, rhs = lax.optimization_barrier((lhs, rhs))
    return dot(dequantize(lhs, BF16), dequantize(rhs, BF16), dtype)


def dot(lhs: jax.Array, rhs: jax.Array, dtype: Any) -> jax.Array:
    """Compute ``lhs @ rhs.T`` in one narrow dtype, rounded once or, in f32, not at all."""
    if dtype == F32:
        words = dot_words(lhs, dtype)
        del words["preferred_element_type"]
        return accumulate(dot_general_p, (lhs, rhs), words, lhs.dtype)
    return lax.dot_general(lhs, rhs, matrix_axes(lhs), preferred_element_type=dtype)
