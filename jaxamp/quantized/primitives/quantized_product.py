"""The product of two quantized matrices, the one place that knows how it is computed.

Where each operand has one scale, or one for each row, the dot multiplies the 8 bits themselves and
the scales multiply its result: there is nothing that XLA could widen. Its default options take a
rounding to 8 bits away that is widened before the dot, and multiply in bf16 (JAX 0.10.2, 0.11.2).
Operands in blocks are widened to bf16 before the dot.

A dot without an algorithm is tried with Triton's kernels first, and to compile those takes minutes:
142 s for a step of four layers where cuBLASLt alone takes 6 s, and none of them was chosen (H200,
JAX 0.11.2). It is also accumulated in fewer bits than float32 has. So in the ``f8_dot`` primitive
products with cotangents name an algorithm that accumulates in float32, the others one that may be
faster, as the recipes of Transformer Engine have it:
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import mlir

from jaxamp.core import jax_compat
from jaxamp.core.define import ORIGINALS, define
from jaxamp.core.formats import Precision
from jaxamp.kernels.target_gpu import gpu_of
from jaxamp.quantized.lowp import ScaledArray, dequantize
from jaxamp.quantized.lowp.scaled_array import factors, scales_result, spread_scale
from jaxamp.quantized.primitives.matrices import dot_words, matrix_axes, product_batch, product_type
from jaxamp.quantized.primitives.quantize_primitive import refuse_derivative
from jaxamp.rewrite.primitives.accumulate import accumulate

BF16 = np.dtype(jnp.bfloat16)
F32 = np.dtype(np.float32)

f8_dot_p = Primitive("f8_dot")

HOPPER = (9, 0)
LEAST = 1024
"""XLA makes a product of a matrix and a vector of a dot that has one row on each device, and no
algorithm is left for it. So many rows have that on no mesh at hand; fewer compile quickly."""


def f8_dot(lhs: Any, rhs: Any, dtype: Any) -> jax.Array:
    """Compute ``lhs @ rhs.T`` of (stacks of) matrices of 8-bit floats, added up in float32."""
    return f8_dot_p.bind(*jax_compat.vary_alike([lhs, rhs]), dtype=np.dtype(dtype))


def _algorithm(lhs: Any, rhs: Any) -> lax.DotAlgorithmPreset | None:
    """Return the algorithm by which cuBLASLt multiplies operands of these types, if it does."""
    sizes = lhs.shape[-2], rhs.shape[-2]
    gradients = [x.dtype == Precision.F8_E5M2.dtype for x in (lhs, rhs)]
    if all(gradients) or not all(isinstance(n, int) and n >= LEAST for n in sizes):
        return None
    presets = lax.DotAlgorithmPreset
    return presets.ANY_F8_ANY_F8_F32 if any(gradients) else presets.ANY_F8_ANY_F8_F32_FAST_ACCUM


def _dot(lhs: Any, rhs: Any, *, dtype: Any, precision: Any = None) -> jax.Array:
    axes = matrix_axes(lhs)
    return lax.dot_general(lhs, rhs, axes, precision=precision, preferred_element_type=dtype)


def _lower_for_cuda(context: Any, *operands: Any, dtype: Any) -> Any:
    gpu = gpu_of(context)
    has_8_bits = gpu is not None and gpu.capability >= HOPPER
    precision = _algorithm(*context.avals_in) if has_8_bits else None
    dot = functools.partial(_dot, dtype=dtype, precision=precision)
    return mlir.lower_fun(dot, multiple_results=False)(context, *operands)


define(f8_dot_p, _dot, product_type, product_batch(f8_dot_p), refuse_derivative)
mlir.register_lowering(f8_dot_p, _lower_for_cuda, platform="cuda")
ORIGINALS[f8_dot_p] = lambda avals, params: (dot_general_p, avals, dot_words(avals[0], **params))


PRODUCT = "jaxamp_product"  # the scope of a product of quantized operands


def product(lhs: ScaledArray, rhs: ScaledArray, dtype: Any) -> jax.Array:
    """Compute ``lhs @ rhs.T`` of (stacks of) matrices, accumulated in float32.

    Both have their blocks along the last axis.
    """
    with jax.named_scope(PRODUCT):
        if all(scales_result(x.cast, x.shape[-1]) for x in (lhs, rhs)):
            return _scaled_result(lhs, rhs, np.dtype(dtype))
        # Without a barrier XLA would remove the rounding where one kernel computes both:
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
