"""Quantization of a dot, as plain data."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, NamedTuple

from jaxamp.core.formats import CastConfig, Precision
from jaxamp.kernels.gpu_lowering import target_gpu
from jaxamp.quantized.kernels.cudnn_block_product import multiplies_blocks
from jaxamp.quantized.lowp.block_layout import scales_result
from jaxamp.quantized.lowp.unit_blocks import fit_units


class Units(Enum):
    """Matrix units that multiply the values of quantized operands."""

    FP8 = "8 bits with one scale for a tensor or a row, or jaxamp's own kernel"
    BLOCKS = "blocks of 8 or 4 bits, each by its scale"
    NONE = "none"


EMULATED = "multiplied in bf16"
EMULATED_BEFORE_BLACKWELL = f"{EMULATED} before Blackwell"
NOTES = {
    EMULATED_BEFORE_BLACKWELL: (
        "multiply in bf16 on an H200 and on every other chip but Blackwell, which multiplies such "
        "blocks. On Hopper jaxamp's kernel does 8 bits in blocks of 128: scaling={'kernel': {}}"
    ),
    EMULATED: "multiply in bf16 on every chip: XLA has no product of such blocks",
}
"""What a report says of products that are multiplied in bf16, by where they are."""


class Scaled(NamedTuple):
    """Quantization of a dot.

    Attributes:
      casts: of both operands.
      gradient: of cotangents in the products that its derivative makes; ``None`` if these are not
        quantized.
      kernel: how the kernel for blocks is compiled; ``None`` if there is none.
    """

    casts: tuple[CastConfig, CastConfig]
    gradient: CastConfig | None
    kernel: Any = None

    @property
    def formats(self) -> tuple[Precision, ...]:
        """Formats of both operands."""
        return tuple(cast.out_dtype for cast in self.casts)

    def units(self, summed: int) -> Units:
        """Return what multiplies the quantized operands as they are, and not widened to bf16.

        Args:
          summed: length of the axes that the dot sums over.
        """
        if all(scales_result(cast, summed) for cast in self.casts):
            return Units.FP8
        blocks = [cast.sf_block for cast in self.casts]
        is_narrow = all(cast.out_dtype.bits == 8 for cast in self.casts)
        if is_narrow and self.kernel is not None and len({b and b[1] for b in blocks}) == 1:
            return Units.FP8
        return Units.BLOCKS if fit_units(self.casts, summed) else Units.NONE

    def emulated(self, eqn: Any) -> str:
        """Return on which chips a dot multiplies its quantized operands in bf16; empty for none."""
        (axes, _), _ = eqn.params["dimension_numbers"]
        units = self.units(math.prod(eqn.invars[0].aval.shape[axis] for axis in axes))
        if units is Units.NONE:
            return EMULATED
        is_here = units is Units.FP8 or multiplies_blocks(target_gpu())
        return "" if is_here else EMULATED_BEFORE_BLACKWELL

    def __str__(self) -> str:
        return " × ".join(map(str, self.casts))
