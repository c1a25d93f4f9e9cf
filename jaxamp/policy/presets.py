"""The policies that have names: presets, and recipes of 8 and 4 bits.

``PrecisionPolicy`` gets them as attributes, and ``PrecisionPolicy.parse`` finds them by name, when
jaxamp is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxamp.core.formats import CastConfig, Precision
from jaxamp.core.guards import ALL_GUARDS, Guard
from jaxamp.core.taxonomy import OpKind
from jaxamp.policy.policy import PRESETS, SYNONYMS, PrecisionPolicy
from jaxamp.policy.scaling import Scaling

# torchao's limits for scales that are finer than one for the tensor.
_ROWWISE = ((None, 2048), (1024, None), (2048, 4096))


def _preset(
    name: str,
    low: Precision,
    *,
    reduction: Precision | None = None,
    accumulation: Precision | None = Precision.F32,
    guards: Iterable[Guard] = ALL_GUARDS,
) -> PrecisionPolicy:
    kinds = dict.fromkeys(OpKind, CastConfig(low))
    kinds[OpKind.REDUCTION] = CastConfig(reduction or low)
    kinds[OpKind.BOUNDARY] = CastConfig(Precision.F32)
    return PrecisionPolicy(name, tuple(kinds.items()), accumulation, guards=frozenset(guards))


def _recipe(name: str, compute: CastConfig, **scaling: Any) -> PrecisionPolicy:
    return MIXED_BF16.replace(
        name=name, kinds={OpKind.COMPUTE: compute}, scaling=Scaling(**scaling)
    )


def _blocks(precision: Precision, rows: int, cols: int) -> CastConfig:
    return CastConfig(precision, (rows, cols), round_sf=True)


ALWAYS_F32 = _preset("always_f32", Precision.F32, accumulation=None)
ALWAYS_F16 = _preset("always_f16", Precision.F16, accumulation=None, guards=())
MIXED_BF16 = _preset("mixed_bf16", Precision.BF16)
MIXED_F16 = _preset("mixed_f16", Precision.F16)
MIXED_F16_CONSERVATIVE = _preset("mixed_f16_conservative", Precision.F16, reduction=Precision.F32)

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

for _policy in (
    ALWAYS_F32,
    ALWAYS_F16,
    MIXED_BF16,
    MIXED_F16,
    MIXED_F16_CONSERVATIVE,
    FP8_CURRENT,
    FP8_DELAYED,
    FP8_BLOCK,
    MXFP8,
    NVFP4,
):
    PRESETS[_policy.name] = _policy
    setattr(PrecisionPolicy, _policy.name.upper(), _policy)

for _synonym, _name in SYNONYMS.items():
    setattr(PrecisionPolicy, _synonym.upper(), PRESETS[_name])
