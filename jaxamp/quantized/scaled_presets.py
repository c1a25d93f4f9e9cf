"""Recipes: presets whose products have 8 and 4 bits."""

from __future__ import annotations

from typing import Any

from jaxamp.core.formats import CastConfig, Precision
from jaxamp.core.taxonomy import OpKind
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.policy.presets import MIXED_BF16
from jaxamp.quantized.scaling import Scaling

# torchao's limits for scales that are finer than one for the tensor.
_ROWWISE = ((None, 2048), (1024, None), (2048, 4096))


def _recipe(name: str, compute: CastConfig, **scaling: Any) -> PrecisionPolicy:
    return MIXED_BF16.replace(
        name=name, kinds={OpKind.COMPUTE: compute}, scaling=Scaling(**scaling)
    )


def _blocks(precision: Precision, rows: int, cols: int) -> CastConfig:
    return CastConfig(precision, (rows, cols), round_sf=True)


FP8_CURRENT = _recipe("fp8_current", CastConfig(Precision.F8_E4M3, None, round_sf=True))
FP8_DELAYED = FP8_CURRENT.replace(name="fp8_delayed", scaling={"history": 1024})
FP8_BLOCK = _recipe(
    "fp8_block",
    _blocks(Precision.F8_E4M3, 1, 128),
    weight=_blocks(Precision.F8_E4M3, 128, 128),
    small=_ROWWISE,
)
MXFP8 = _recipe("mxfp8", _blocks(Precision.F8_E4M3, 1, 32), small=_ROWWISE)
NVFP4 = _recipe(
    "nvfp4",
    CastConfig(Precision.F4_E2M1, (1, 16)),
    weight=CastConfig(Precision.F4_E2M1, (16, 16)),
    backward=False,
    small=_ROWWISE,
)

ALL = FP8_CURRENT, FP8_DELAYED, FP8_BLOCK, MXFP8, NVFP4
