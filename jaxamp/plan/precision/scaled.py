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

    def __str__(self) -> str:
        return " × ".join(map(str, self.casts))
