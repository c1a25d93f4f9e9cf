"""cuDNN's product of operands in MXFP8 or NVFP4 blocks, through JAX's own call."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from jaxamp.core.target_gpu import TargetGpu
from jaxamp.quantized.lowp import ScaledArray
from jaxamp.quantized.lowp.unit_blocks import fit_units, in_units

LEAST = (10, 0)
"""The least compute capability that multiplies blocks: Blackwell's."""
_CUDNN = 90700  # XLA calls it from 9.7 on: xla/service/gpu/transforms/block_scaling_rewriter.cc
_F32 = np.dtype(np.float32)


def multiplies_blocks(gpu: TargetGpu | None) -> bool:
    """Return whether a GPU multiplies blocks of 8 and 4 bits, by XLA's conditions.

    >>> multiplies_blocks(TargetGpu((10, 0), 91200)), multiplies_blocks(TargetGpu((9, 0), 91200))
    (True, False)
    """
    return gpu is not None and gpu.capability >= LEAST and (gpu.cudnn or 0) >= _CUDNN


def takes(lhs: ScaledArray, rhs: ScaledArray) -> bool:
    """Return whether the kernel takes these operands: arrays, or their types."""
    if not all(isinstance(size, int) and size for size in (*lhs.shape, *rhs.shape)):
        return False
    return fit_units((lhs.cast, rhs.cast), lhs.shape[-1])


def block_product(lhs: ScaledArray, rhs: ScaledArray, dtype: Any) -> jax.Array:
    """Compute ``lhs @ rhs.T``, accumulated in float32, of (stacks of) matrices.

    Args:
      lhs: of shape ``(*batch, M, K)``, its blocks along ``K``.
      rhs: of shape ``(*batch, N, K)``, its blocks along ``K``.
      dtype: of the result: float32, bfloat16 or float16.

    Returns:
      Shape ``(*batch, M, N)``.
    """
    left, right = in_units(lhs), in_units(rhs)
    factors = [x.tensor for x in (left, right) if x.tensor is not None]
    made = _F32 if factors else np.dtype(dtype)
    stacks = map(_one_batch, (left.values, right.values, left.scale, right.scale))
    out = jax.nn.scaled_matmul(*stacks, preferred_element_type=made)
    out = out.reshape(*lhs.shape[:-1], rhs.shape[-2])
    for factor in factors:
        out = out * factor
    return out.astype(dtype)


def _one_batch(x: Any) -> Any:
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
