"""Quantization of a dot, as plain data."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jaxamp.core.formats import CastConfig, Precision
from jaxamp.quantized.lowp.scaled_array import scales_result


class Scaled(NamedTuple):
    """Quantization of a dot: of its operands, and of cotangents where backward products are."""

    casts: tuple[CastConfig, CastConfig]
    gradient: CastConfig | None

    @property
    def formats(self) -> tuple[Precision, ...]:
        """Formats of both operands."""
        return tuple(cast.out_dtype for cast in self.casts)

    def emulated(self, eqn: Any) -> str:
        """Return that a dot widens its operands, which are blocks; empty for others."""
        (axes, _), _ = eqn.params["dimension_numbers"]
        summed = math.prod(eqn.invars[0].aval.shape[axis] for axis in axes)
        scale_results = all(scales_result(cast, summed) for cast in self.casts)
        return "" if scale_results else "multiplied in bf16"

    def __str__(self) -> str:
        return " × ".join(map(str, self.casts))
