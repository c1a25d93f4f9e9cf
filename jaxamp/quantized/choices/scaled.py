"""Quantization of a dot, as plain data."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jaxamp.core.formats import CastConfig, Precision
from jaxamp.kernels.target_gpu import target_gpu
from jaxamp.quantized.lowp.block_layout import scales_result
from jaxamp.quantized.lowp.unit_blocks import fit_units, multiplies_blocks

EMULATED = "multiplied in bf16"
EMULATED_BEFORE_BLACKWELL = f"{EMULATED} before Blackwell"
NOTES = {
    EMULATED_BEFORE_BLACKWELL: (
        "multiply in bf16 on an H200 and on every other chip but Blackwell, which multiplies such "
        "blocks"
    ),
    EMULATED: "multiply in bf16 on every chip: XLA has no product of such blocks",
}
"""Remarks of reports on products that are multiplied in bf16, by where they are."""


class Scaled(NamedTuple):
    """Quantization of a dot.

    Attributes:
      casts: of both operands.
      gradient: of cotangents in the products that its derivative makes; ``None`` if these are not
        quantized.
    """

    casts: tuple[CastConfig, CastConfig]
    gradient: CastConfig | None

    @property
    def formats(self) -> tuple[Precision, ...]:
        """Formats of both operands."""
        return tuple(cast.out_dtype for cast in self.casts)

    def emulated(self, eqn: Any) -> str:
        """Return on which chips a dot multiplies its quantized operands in bf16; empty for none."""
        (axes, _), _ = eqn.params["dimension_numbers"]
        summed = math.prod(eqn.invars[0].aval.shape[axis] for axis in axes)
        if all(scales_result(cast, summed) for cast in self.casts):
            return ""
        if not fit_units(self.casts, summed):
            return EMULATED
        return "" if multiplies_blocks(target_gpu()) else EMULATED_BEFORE_BLACKWELL

    def __str__(self) -> str:
        return " × ".join(map(str, self.casts))
