"""``f8_dot`` primitive: a dot of 8-bit floats, which XLA gives to cuBLASLt where it takes it.

A dot without an algorithm is tried with Triton's kernels first, and to compile those takes minutes:
142 s for a step of four layers where cuBLASLt alone takes 6 s, and none of them was chosen (H200,
JAX 0.11.2). It is also accumulated in fewer bits than float32 has. So products with cotangents name
an algorithm that accumulates in float32, the others one that may be faster, as the recipes of
Transformer Engine have it:
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import mlir

from jaxamp.core import jax_compat
from jaxamp.core.define import ORIGINALS, define
from jaxamp.core.formats import Precision
from jaxamp.kernels.gpu_lowering import gpu_of
from jaxamp.quantized.primitives.matrices import (
    dot_words,
    matrix_axes,
    product_batch,
    product_type,
)
from jaxamp.quantized.primitives.quantize_primitive import refuse_derivative

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
