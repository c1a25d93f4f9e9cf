"""Presets, the policies that have names; features add theirs.

``PrecisionPolicy`` gets them as attributes, and ``PrecisionPolicy.parse`` finds them by name, when
jaxamp is imported.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxamp.core.formats import CastConfig, Precision
from jaxamp.core.guards import ALL_GUARDS, Guard
from jaxamp.core.taxonomy import OpKind
from jaxamp.policy.policy import PRESETS, SYNONYMS, PrecisionPolicy


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


ALWAYS_F32 = _preset("always_f32", Precision.F32, accumulation=None)
ALWAYS_F16 = _preset("always_f16", Precision.F16, accumulation=None, guards=())
MIXED_BF16 = _preset("mixed_bf16", Precision.BF16)
MIXED_F16 = _preset("mixed_f16", Precision.F16)
MIXED_F16_CONSERVATIVE = _preset("mixed_f16_conservative", Precision.F16, reduction=Precision.F32)


def enter_presets(policies: Iterable[PrecisionPolicy]) -> None:
    """Let policies be found by their names."""
    for policy in policies:
        PRESETS[policy.name] = policy
        setattr(PrecisionPolicy, policy.name.upper(), policy)


enter_presets((ALWAYS_F32, ALWAYS_F16, MIXED_BF16, MIXED_F16, MIXED_F16_CONSERVATIVE))

for _synonym, _name in SYNONYMS.items():
    setattr(PrecisionPolicy, _synonym.upper(), PRESETS[_name])
