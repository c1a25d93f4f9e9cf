"""An array of few bits together with its scale factors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxamp.core.formats import CastConfig
from jaxamp.errors import PolicyError, shown
from jaxamp.quantized.lowp.block_layout import Blocks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledArray:
    """``values`` of 8 or 4 bits, each to be multiplied with the scale factor of its block.

    A pytree: it goes through jit, scan, vmap and checkpoints.

    Attributes:
      values: in ``cast.out_dtype``, of the shape of the array that it stands for.
      scale: a scale factor for each block: float32, or ``float8_e8m0fnu`` where they are powers of
        two. Those of 4-bit blocks are a ``ScaledArray`` again: e4m3, with one float32 for all.
      cast: how it was made.
      dtype: dtype of the array that it stands for.

    >>> from jaxamp.quantized.lowp import quantize
    >>> x = quantize(jnp.arange(6.0).reshape(2, 3), CastConfig("f8_e4m3", sf_block=(1, 128)))
    >>> x.shape, x.scale.shape, x.nbytes
    ((2, 3), (2, 1), 14)
    """

    values: Any
    scale: Any
    cast: CastConfig = field(metadata={"static": True})
    dtype: np.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that it stands for."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """Number of its axes."""
        return self.values.ndim

    @property
    def nbytes(self) -> float:
        """Bytes of values and scale factors, on a device that packs 4-bit values in pairs.

        >>> from jaxamp.quantized.lowp import quantize
        >>> quantize(jnp.ones((16, 32)), CastConfig("f4_e2m1", (1, 32), True)).nbytes
        272
        """
        own = self.values.size * self.cast.out_dtype.bits // 8
        return own + self.scale.nbytes


def dequantize(x: ScaledArray, dtype: DTypeLike | None = None) -> jax.Array:
    """Return the array that a ``ScaledArray`` stands for.

    Args:
      x: values and scale factors.
      dtype: of the result; by default that of the array that was quantized.

    Returns:
      ``values * scale``, multiplied in float32 and rounded once. Blocks whose scale is NaN are NaN.

    Raises:
      PolicyError: ``x`` is not a ``ScaledArray``.

    >>> from jaxamp.quantized.lowp import quantize
    >>> dequantize(quantize(jnp.array([0.0, 3.0, 448.0]), CastConfig("f8_e4m3")))
    Array([  0.,   3., 448.], dtype=float32)
    """
    if not isinstance(x, ScaledArray):
        raise PolicyError(
            f"dequantize takes what quantize returns, a ScaledArray, not {shown(x)}. Another array "
            "stands for itself; x.astype(dtype) changes its dtype."
        )
    product = x.values.astype(np.float32) * spread_scale(x)
    return product.astype(x.dtype if dtype is None else dtype)


def spread_scale(x: ScaledArray) -> jax.Array:
    """Return the scale factors in float32, of a shape that broadcasts to that of the values."""
    scale = factors(x)
    blocks = Blocks.of(x.cast, x.shape)
    if blocks is None:  # one factor, or under vmap and in stacks one for each tensor
        return scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim))
    return blocks.spread(scale, x.shape)


def factors(x: ScaledArray) -> jax.Array:
    """Return the scale factors in float32, one for each block."""
    if isinstance(x.scale, ScaledArray):
        return dequantize(x.scale, np.float32)
    return jnp.asarray(x.scale).astype(np.float32)
