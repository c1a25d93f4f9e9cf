"""Policies as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, TypeVar

from jaxamp.core.formats import CastConfig, Precision
from jaxamp.core.taxonomy import OpKind
from jaxamp.errors import PolicyError, accepted, shown
from jaxamp.policy.rules import Rule
from jaxamp.policy.scaling import Scaling

_P = TypeVar("_P")

_VERSION = 1
_PLAIN_KEYS = ("accumulation", "guards", "param_dtype", "output_dtype", "allreduce")
_KEYS = ("version", "name", "kinds", "rules", "scaling", "xla", "fused_attention", *_PLAIN_KEYS)
_OPTIONAL = ("scaling", "xla", "fused_attention")
_TYPES = {"name": str, "kinds": dict, "rules": list, "guards": list, "scaling": dict}
_ADVICE = "PrecisionPolicy.to_json() writes one; a preset needs none: amp(fn, 'mixed_bf16')."


def to_json(policy: Any) -> str:
    """Return a policy as JSON."""
    data = {
        "version": _VERSION,
        "name": policy.name,
        "kinds": {kind.value: _cast_to_data(cast) for kind, cast in policy.kinds},
        "accumulation": _word(policy.accumulation),
        "rules": [rule.to_data() for rule in policy.rules],
        "guards": sorted(guard.value for guard in policy.guards),
        "param_dtype": _word(policy.param_dtype),
        "output_dtype": _word(policy.output_dtype),
        "allreduce": policy.allreduce.short,
        "scaling": _scaling_to_data(policy.scaling),
        "xla": sorted(technique.value for technique in policy.xla),
        "fused_attention": policy.fused_attention,
    }
    return json.dumps(data, indent=2)


def from_json(make: Callable[..., _P], text: str) -> _P:
    """Build a policy with ``make`` from the JSON that ``to_json`` wrote."""
    data = _json_object(text)
    for key in data:
        if key not in _KEYS:
            raise PolicyError(f"A policy's JSON has no {key!r}. {accepted(key, _KEYS)}")
    missing = [key for key in _KEYS if key not in data and key not in _OPTIONAL]
    if missing:
        raise PolicyError(f"This JSON is not a policy: it has no {', '.join(missing)}. {_ADVICE}")
    try:
        return make(
            name=data["name"],
            kinds=tuple((OpKind.parse(k), _cast_from(cast)) for k, cast in data["kinds"].items()),
            rules=tuple(Rule(**rule) for rule in data["rules"]),
            scaling=_scaling_from(data.get("scaling", {})),
            xla=data.get("xla", "all"),
            fused_attention=data.get("fused_attention"),
            **{key: data[key] for key in _PLAIN_KEYS},
        )
    except (KeyError, TypeError, AttributeError) as error:
        wrong = [key for key, kind in _TYPES.items() if not isinstance(data.get(key, kind()), kind)]
        where = f"its {wrong[0]} is {shown(data[wrong[0]])}" if wrong else f"{error}"
        raise PolicyError(f"This JSON is not a policy of jaxamp: {where}. {_ADVICE}") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (TypeError, ValueError) as error:
        raise PolicyError(
            f"{shown(text)} is not JSON text ({error}). To read a file: "
            "PrecisionPolicy.from_json(Path(...).read_text())."
        ) from None
    if not isinstance(data, dict) or "version" not in data:
        raise PolicyError(f"This JSON is not a policy: it has no version. {_ADVICE}")
    if data["version"] != _VERSION:
        raise PolicyError(
            f"JSON of version {data['version']!r} is not understood; this jaxamp reads {_VERSION}."
        )
    return data


def _word(precision: Precision | None) -> str | None:
    return None if precision is None else precision.short


def _cast_to_data(cast: CastConfig) -> dict[str, Any]:
    return {
        "out_dtype": cast.out_dtype.short,
        "sf_block": cast.sf_block,
        "round_sf": cast.round_sf,
    }


def _cast_from(data: str | dict[str, Any]) -> CastConfig:
    if isinstance(data, str):
        return CastConfig.plain(data)
    block = data["sf_block"]
    return CastConfig(data["out_dtype"], block and tuple(block), data["round_sf"])


def _scaling_to_data(scaling: Scaling) -> dict[str, Any]:
    fields = {f.name: getattr(scaling, f.name) for f in dataclasses.fields(scaling)}
    data = {k: _cast_to_data(v) if isinstance(v, CastConfig) else v for k, v in fields.items()}
    return data | ({} if scaling.kernel is None else {"kernel": scaling.kernel.to_data()})


def _scaling_from(data: dict[str, Any]) -> Scaling:
    fields: dict[str, Any] = {
        key: _cast_from(value) if key in ("weight", "gradient") and value else value
        for key, value in data.items()
    }
    return Scaling(**fields)
