"""``block_product`` primitive: a product of operands in blocks, which some GPUs multiply as such.

Lowered for a GPU whose matrix units multiply the blocks it is cuDNN's call, elsewhere the product
of widened operands: of the same values and scales, added up in another order. For blocks of 4 bits
the widened operands are rounded to bf16 besides, as their scales are no powers of two.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
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
from jaxamp.kernels.target_gpu import gpu_of, lower
from jaxamp.quantized.lowp import ScaledArray, dequantize
from jaxamp.quantized.lowp.unit_blocks import fit_units, in_units, multiplies_blocks
from jaxamp.quantized.primitives.matrices import (
    batch_first,
    dot_words,
    matrix_axes,
    multiply_mapped,
)
from jaxamp.quantized.primitives.quantize_primitive import refuse_derivative
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


block_product_p = Primitive("block_product")

Trees = tuple[Any, Any]  # of both operands


def block_product(lhs: ScaledArray, rhs: ScaledArray, dtype: Any) -> jax.Array:
    """Compute ``lhs @ rhs.T`` in one equation, of operands that `takes` accepts."""
    (left, left_tree), (right, right_tree) = map(jax.tree.flatten, (lhs, rhs))
    leaves = jax_compat.vary_alike([*left, *right])
    trees = left_tree, right_tree
    return block_product_p.bind(*leaves, trees=trees, dtype=np.dtype(dtype))


def takes(lhs: ScaledArray, rhs: ScaledArray) -> bool:
    """Return whether some GPU multiplies these operands as they are: arrays, or their types."""
    sizes = *lhs.shape, *rhs.shape
    return all(isinstance(n, int) and n for n in sizes) and fit_units(
        (lhs.cast, rhs.cast), lhs.shape[-1]
    )


def dot_of(avals: Sequence[Any], *, trees: Trees, dtype: Any) -> tuple[Any, Any, Any]:
    """Return the dot that an equation stands for: its primitive, operands' types, parameters."""
    lhs, rhs = (x.values for x in _operands(avals, trees))
    return dot_general_p, (lhs, rhs), dot_words(lhs, dtype)


def _operands(leaves: Sequence[Any], trees: Trees) -> tuple[Any, Any]:
    count = trees[0].num_leaves
    return trees[0].unflatten(leaves[:count]), trees[1].unflatten(leaves[count:])


def _widened(*leaves: Any, trees: Trees, dtype: Any) -> jax.Array:
    return widened_product(*_operands(leaves, trees), dtype)


def _called(*leaves: Any, trees: Trees, dtype: Any) -> list[jax.Array]:
    return [by_cudnn(*_operands(leaves, trees), dtype)]


def by_cudnn(lhs: ScaledArray, rhs: ScaledArray, dtype: Any) -> jax.Array:
    """Compute ``lhs @ rhs.T`` of (stacks of) matrices by JAX's own call, accumulated in float32."""
    left, right = in_units(lhs), in_units(rhs)
    tensors = [x.tensor for x in (left, right) if x.tensor is not None]
    made = F32 if tensors else np.dtype(dtype)
    parts = left.values, right.values, left.scale, right.scale
    stacks = (x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]) for x in parts)
    out = jax.nn.scaled_matmul(*stacks, preferred_element_type=made)
    out = out.reshape(*lhs.shape[:-1], rhs.shape[-2])
    for tensor in tensors:
        out = out * tensor
    return out.astype(dtype)


def _type(*avals: Any, **params: Any) -> Any:
    _, operands, words = dot_of(avals, **params)
    narrow = [aval.update(dtype=np.dtype(jnp.bfloat16)) for aval in operands]
    return dot_general_p.abstract_eval(*narrow, **words)[0]


def _batch(
    leaves: Sequence[Any], axes: Sequence[Any], *, trees: Trees, dtype: Any
) -> tuple[jax.Array, int]:
    """Batch the product; rows of one operand are stacked where the other is shared."""
    size = next(x.shape[axis] for x, axis in zip(leaves, axes, strict=True) if axis is not None)
    operands = _operands([*map(batch_first, leaves, axes)], trees)
    count = trees[0].num_leaves
    mapped = [any(axis is not None for axis in part) for part in (axes[:count], axes[count:])]
    if not all(mapped) and not _has_whole_blocks(operands[mapped.index(True)]):
        mapped = [True, True]
    if all(mapped):
        whole = [
            x if axis is not None else jnp.broadcast_to(x, (size, *x.shape))
            for x, axis in zip(jax.tree.leaves(operands), axes, strict=True)
        ]
        operands = _operands(whole, trees)
    return multiply_mapped(functools.partial(block_product, dtype=dtype), *operands, mapped), 0


def _has_whole_blocks(x: ScaledArray) -> bool:
    """Return whether no block would lie in two of the matrices whose rows are stacked."""
    assert x.cast.sf_block is not None
    is_flat = not isinstance(x.scale, ScaledArray)  # a scale of each tensor cannot be stacked
    return is_flat and x.shape[-2] % x.cast.sf_block[0] == 0


def _lower_for_cuda(context: Any, *leaves: Any, trees: Trees, dtype: Any) -> Any:
    operands = _operands(context.avals_in, trees)
    is_taken = multiplies_blocks(gpu_of(context)) and takes(*operands)
    # JAX's rule for a partitioner reads the names of a mesh, which that of XLA does not give it.
    is_called = is_taken and not jax_compat.is_partitioned(context)
    called, listed = (functools.partial(f, trees=trees, dtype=dtype) for f in (_called, _listed))
    return lower(called if is_called else None, listed, context, *leaves)


def _listed(*leaves: Any, **params: Any) -> list[jax.Array]:
    return [_widened(*leaves, **params)]


define(block_product_p, _widened, _type, _batch, refuse_derivative)
mlir.register_lowering(block_product_p, _lower_for_cuda, platform="cuda")
ORIGINALS[block_product_p] = lambda avals, params: dot_of(avals, **params)
