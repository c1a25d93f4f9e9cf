"""Operands of a dot as stacks of matrices, ``(*batch, rows, columns)``, also under vmap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.extend.core.primitives import dot_general_p


def as_matrices(
    x: Any, summed: Sequence[int], batch: Sequence[int]
) -> tuple[jax.Array, tuple[int, ...]]:
    """Reshape an operand to matrices whose last axis is contracted; return its free axes too."""
    free = [axis for axis in range(x.ndim) if axis not in (*summed, *batch)]
    shape = [tuple(x.shape[axis] for axis in axes) for axes in (batch, free, summed)]
    matrices = (*shape[0], math.prod(shape[1]), math.prod(shape[2]))
    return lax.reshape(lax.transpose(x, (*batch, *free, *summed)), matrices), shape[1]


def matrix_axes(x: Any, of_rhs: int = -1) -> Any:
    """Return the dimension numbers of ``lhs @ rhs.T`` of stacks of matrices such as ``x``.

    With -2 for the axis of ``rhs`` that is summed over, the product is ``lhs @ rhs``.
    """
    batch = tuple(range(x.ndim - 2))
    return ((x.ndim - 1,), (x.ndim + of_rhs,)), (batch, batch)


def dot_words(x: Any, dtype: Any, of_rhs: int = -1) -> dict[str, Any]:
    """Return the parameters of a ``dot_general`` with these axes; `dtype` is that of its result."""
    words = {"precision": None, "preferred_element_type": dtype, "out_sharding": None}
    return {"dimension_numbers": matrix_axes(x, of_rhs), **words}


def product_type(lhs: Any, rhs: Any, *, dtype: Any, **_: Any) -> Any:
    """Return the type of ``lhs @ rhs.T``, the abstract evaluation of a product's primitive."""
    return dot_general_p.abstract_eval(lhs, rhs, **dot_words(lhs, dtype))[0]


def product_batch(primitive: Primitive) -> Callable[..., tuple[jax.Array, int]]:
    """Return the batching rule of a primitive that is ``lhs @ rhs.T`` of matrices."""

    def batch(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[jax.Array, int]:
        multiply = partial(primitive.bind, **params)
        lhs, rhs = map(batch_first, operands, axes)
        if axes[1] is None:  # rows of the other operand are stacked where one is shared
            return split_rows(multiply(merge_rows(lhs), rhs), lhs.shape[0]), 0
        if axes[0] is None:
            return split_rows(multiply(lhs, merge_rows(rhs)).mT, rhs.shape[0]).mT, 0
        return multiply(lhs, rhs), 0

    return batch


def batch_first(x: Any, axis: Any) -> Any:
    """Move the mapped axis of an operand to the front; with ``None`` it has none."""
    return x if axis is None else jnp.moveaxis(x, axis, 0)


def merge_rows(x: Any) -> Any:
    """Reshape ``(V, *batch, rows, K)`` to ``(*batch, V * rows, K)``."""
    stacks = jnp.moveaxis(x, 0, -3)
    return stacks.reshape(*stacks.shape[:-3], stacks.shape[-3] * stacks.shape[-2], stacks.shape[-1])


def split_rows(x: Any, count: int) -> Any:
    """Reshape ``(*batch, V * rows, N)`` back to ``(V, *batch, rows, N)``."""
    stacks = x.reshape(*x.shape[:-2], count, x.shape[-2] // count, x.shape[-1])
    return jnp.moveaxis(stacks, -3, 0)
