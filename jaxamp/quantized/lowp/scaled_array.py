"""Arrays of few bits together with their scale factors: quantized, and widened again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxamp.core.formats import SCALED_FORMATS, CastConfig, Precision, PrecisionLike
from jaxamp.errors import PolicyError, shown
from jaxamp.quantized.lowp.arithmetic import encode, reciprocal, scale_factor


def scales_result(cast: CastConfig, summed: int) -> bool:
    """Return whether scales can multiply the product that sums so many: one for all, or each row.

    >>> scales_result(CastConfig.plain("f8_e4m3"), 64)
    True
    """
    block = cast.sf_block
    return block is None or (block[0] == 1 and block[1] >= summed)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of an array's last two axes; leading axes are apart.

    A block at the edge is smaller where ``rows`` and ``cols`` do not divide the array: nothing is
    padded as far as a caller can see.

    >>> Blocks(1, 128).factors((3, 300))
    (3, 3)
    """

    rows: int  # rows of a block; 1 for an array of one axis
    cols: int  # columns of a block

    @classmethod
    def of(cls, cast: CastConfig, shape: tuple[int, ...]) -> Blocks | None:
        """Return the blocks that a cast makes of an array; ``None`` for one block, the whole.

        Raises:
          PolicyError: the array has fewer axes than the block.
        """
        if cast.sf_block is None:
            return None
        rows, cols = cast.sf_block
        if len(shape) < (2 if rows > 1 else 1):
            raise PolicyError(
                f"An array of shape {shape} has no blocks of {rows} x {cols}: they lie on the last "
                "two axes. Scale the whole tensor (sf_block=None), or give the array more axes."
            )
        return cls(rows, cols)

    def factors(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scale factors of an array of that shape: one for each block."""
        *leading, cols = shape
        columns = -(-cols // self.cols)
        if not leading:
            return (columns,)
        return (*leading[:-1], -(-leading[-1] // self.rows), columns)

    def amax(self, x: Any) -> jax.Array:
        """Return the largest magnitude in each block; NaN if there is a NaN."""
        split = jnp.abs(self._split(x))
        return jnp.max(split, axis=(-3, -1)).reshape(self.factors(x.shape))

    def spread(self, factors: Any, shape: tuple[int, ...]) -> jax.Array:
        """Return each factor over its whole block: an array of the shape that was divided."""
        rows, cols = (1, *shape)[-2:]
        over_rows = factors.reshape(*shape[:-2], -1, 1, factors.shape[-1], 1)
        blocks = over_rows.shape[-4], self.rows, over_rows.shape[-2], self.cols
        full = jnp.broadcast_to(over_rows, (*shape[:-2], *blocks))
        merged = full.reshape(*shape[:-2], blocks[0] * blocks[1], blocks[2] * blocks[3])
        return merged[..., :rows, :cols].reshape(shape)

    def _split(self, x: Any) -> jax.Array:
        """Reshape to ``(..., row blocks, rows, column blocks, cols)``, padded with zeros."""
        rows, cols = (1, *x.shape)[-2:]
        matrix = x.reshape(*x.shape[:-2], rows, cols)
        margins = [(0, 0)] * (matrix.ndim - 2) + [(0, -rows % self.rows), (0, -cols % self.cols)]
        filled = jnp.pad(matrix, margins) if any(after for _, after in margins) else matrix
        row_blocks, column_blocks = -(-rows // self.rows), -(-cols // self.cols)
        return filled.reshape(*x.shape[:-2], row_blocks, self.rows, column_blocks, self.cols)


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
    >>> x.shape, x.scale.shape
    ((2, 3), (2, 1))
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


def quantize(x: Any, cast: CastConfig | PrecisionLike) -> ScaledArray:
    """Scale an array so that each block fills the range of a format, and round it to the format.

    The scale of a block is ``amax * (1 / fmax)`` in float32, ``amax`` being the largest magnitude
    in the block and ``fmax`` the largest number of the format. It is rounded up to a power of two
    with ``round_sf``, and is at least ``2 * 2**-126`` divided by the smallest number of the format:
    then zeros need no exception and subnormal float32 numbers become zero on every backend. A block
    that holds an infinity or NaN has the scale NaN and is NaN as a whole after ``dequantize``.
    Blocks at the edge are smaller where the block does not divide the array.

    Scales of powers of two are stored as ``float8_e8m0fnu`` (OCP Microscaling Formats 1.0,
    section 5.4), those of 4-bit blocks otherwise as e4m3 with one float32 for the whole tensor
    (NVFP4), all others as float32.

    Args:
      x: floats; blocks lie on the last two axes.
      cast: format and block, or a format alone for one scale factor.

    Returns:
      Values of the shape of ``x`` with their scale factors. There is no derivative: ``amp`` gives
      quantized dots theirs.

    Raises:
      PolicyError: the format is not e4m3, e5m2 or e2m1, ``x`` holds no floats, or it has fewer
        axes than the block.

    >>> q = quantize(jnp.array([1.0, -2.0, 0.3]), CastConfig("f8_e4m3", round_sf=True))
    >>> q.values, q.scale
    (Array([128, -256, 40], dtype=float8_e4m3fn), Array(0.0078125, dtype=float8_e8m0fnu))
    """
    cast = cast if isinstance(cast, CastConfig) else CastConfig(cast)
    x = jnp.asarray(x)
    _check(x, cast)
    blocks = Blocks.of(cast, x.shape)
    amax = jnp.max(jnp.abs(x), initial=0) if blocks is None else blocks.amax(x)
    scale = stored_scale(scale_factor(amax, cast.out_dtype, round_up=cast.round_sf), cast)
    return with_scale(x, scale, cast)


def with_scale(x: jax.Array, scale: Any, cast: CastConfig) -> ScaledArray:
    """Return floats rounded with scale factors that are known already, as ``ScaledArray.scale`` is.

    What is larger than they allow is clipped.
    """
    known = ScaledArray(x, scale, cast, x.dtype)
    factor = factors(known)
    inverse = reciprocal(factor, is_power=cast.round_sf)
    blocks = Blocks.of(cast, x.shape)
    if blocks is not None:
        factor, inverse = blocks.spread(factor, x.shape), blocks.spread(inverse, x.shape)
    return ScaledArray(encode(x, factor, inverse, cast.out_dtype), scale, cast, x.dtype)


def stored_scale(scale: jax.Array, cast: CastConfig) -> Any:
    """Return the scale factors in float32 as a ``ScaledArray`` stores them."""
    if cast.round_sf:
        return scale.astype(Precision.F8_E8M0.dtype)
    if cast.out_dtype is Precision.F4_E2M1 and cast.sf_block is not None:
        return quantize(scale, CastConfig(Precision.F8_E4M3))
    return scale


def _check(x: jax.Array, cast: CastConfig) -> None:
    if cast.out_dtype not in SCALED_FORMATS:
        words = ", ".join(p.short for p in SCALED_FORMATS)
        raise PolicyError(
            f"{cast} is not a scaled format. Values of 8 and 4 bits are scaled: {words}."
        )
    if not jnp.issubdtype(x.dtype, np.floating):
        raise PolicyError(f"Only floats are quantized, not {x.dtype} of shape {x.shape}.")
