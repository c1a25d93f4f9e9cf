"""The blocks that matrix units multiply by themselves, and operands written in them.

Blackwell, NVIDIA's GPUs of compute capability 10 and more, multiplies values of 8 bits with a power
of two for each 32 of them along the axis that is summed over (MXFP8), and values of 4 bits with a
number in e4m3 for each 16 (NVFP4). A longer block, or one of several rows, is many with one scale.

See: OCP Microscaling Formats 1.0, section 5; NVIDIA, "PTX ISA", block scaling of ``tcgen05.mma``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxamp.core.formats import CastConfig, Precision
from jaxamp.kernels.target_gpu import TargetGpu
from jaxamp.quantized.lowp.block_layout import Blocks
from jaxamp.quantized.lowp.scaled_array import ScaledArray

_LEAST = (10, 0)
"""The least compute capability that multiplies blocks: Blackwell's."""
_CUDNN = 90700  # XLA calls it from 9.7 on: xla/service/gpu/transforms/block_scaling_rewriter.cc
_MXFP8, _NVFP4 = 32, 16


def multiplies_blocks(gpu: TargetGpu | None) -> bool:
    """Return whether a GPU multiplies blocks of 8 and 4 bits, by XLA's conditions.

    >>> multiplies_blocks(TargetGpu((10, 0), 91200)), multiplies_blocks(TargetGpu((9, 0), 91200))
    (True, False)
    """
    return gpu is not None and gpu.capability >= _LEAST and (gpu.cudnn or 0) >= _CUDNN


class InUnits(NamedTuple):
    """An operand in the blocks of a matrix unit.

    Attributes:
      values: [..., rows, K], of 8 or 4 bits.
      scale: [..., rows, K / length], as they are stored.
      tensor: float32 that multiplies all, and broadcasts to a result; ``None`` for one.
    """

    values: jax.Array
    scale: jax.Array
    tensor: jax.Array | None


def fit_units(casts: tuple[CastConfig, CastConfig], summed: Any) -> bool:
    """Return whether a matrix unit multiplies operands of such casts, each block by its scale.

    Args:
      casts: of both operands, whose blocks lie along the axis that is summed over.
      summed: length of that axis.

    >>> row, square = (CastConfig("f8_e4m3", block, True) for block in ((1, 128), (128, 128)))
    >>> fit_units((row, square), 4096), fit_units((row, square), 4112)
    (True, False)
    >>> fit_units((CastConfig("f8_e4m3", (1, 128)),) * 2, 4096)  # scales are any float32
    False
    """
    length, other = map(_length, casts)
    if length is None or length != other or not isinstance(summed, int):
        return False
    if all(cast.out_dtype is Precision.F8_E5M2 for cast in casts):
        return False  # of two formats one has to be e4m3
    return summed > 0 and summed % length == 0


def _length(cast: CastConfig) -> int | None:
    """Return the length of the blocks that a cast can be written in, along the summed axis."""
    if cast.sf_block is None or cast.round_sf != (cast.out_dtype.bits == 8):
        return None
    length = _MXFP8 if cast.round_sf else _NVFP4
    return None if cast.sf_block[1] % length else length


def in_units(x: ScaledArray) -> InUnits:
    """Return an operand that `fit_units` accepts in the blocks of a matrix unit.

    >>> from jaxamp.quantized.lowp import quantize
    >>> x = quantize(jnp.ones((3, 256)), CastConfig("f8_e4m3", (128, 128), True))
    >>> x.scale.shape, in_units(x).scale.shape
    ((1, 2), (3, 8))
    """
    length = _length(x.cast)
    assert length is not None
    assert x.cast.sf_block is not None
    rows, cols = x.cast.sf_block
    stored, tensor = x.scale, None
    if isinstance(stored, ScaledArray):
        stored, tensor = stored.values, jnp.asarray(stored.scale)
        tensor = tensor.reshape(tensor.shape + (1,) * (x.ndim - tensor.ndim))
    shape = (*x.shape[:-1], x.shape[-1] // length)
    scale = Blocks(rows, cols // length).spread(stored, shape)
    return InUnits(x.values, scale, tensor)
