"""Quantization of a dot, as plain data."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxamp.core.formats import CastConfig


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

    def is_emulated(self, summed: int) -> bool:
        """Return whether the quantized operands are multiplied in bf16.

        XLA multiplies 8 bits with one scale for each operand, or one for each row; smaller blocks
        need jaxamp's own kernel.

        Args:
          summed: length of the axes that the dot sums over.
        """
        blocks = [cast.sf_block for cast in self.casts]
        if any(cast.out_dtype.bits < 8 for cast in self.casts):
            return True
        if blocks == [None, None]:
            return False
        if self.kernel is not None and all(blocks) and len({b[1] for b in blocks if b}) == 1:
            return False
        return not all(b is not None and b[0] == 1 and b[1] >= summed for b in blocks)

    def __str__(self) -> str:
        return " × ".join(map(str, self.casts))
