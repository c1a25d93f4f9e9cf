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
_KEYS = (
    "version", "name", "kinds", "accumulation", "rules", "guards", "param_dtype", "output_dtype",
    "allreduce", "scaling", "xla", "fused_attention",
)  # fmt: skip
_OPTIONAL = {"scaling": {}, "xla": "all", "fused_attention": None}
_TYPES = {"name": str, "kinds": dict, "rules": list, "guards": list, "scaling": dict}
_ADVICE = "PrecisionPolicy.to_json() writes one; a preset needs none: amp(fn, 'mixed_bf16')."


def to_json(policy: Any) -> str:
    """Return a policy as JSON."""
    data = {"version": _VERSION} | {key: getattr(policy, key) for key in _KEYS[1:]}
    data["kinds"] = {kind.value: cast for kind, cast in policy.kinds}
    return json.dumps(data, indent=2, default=_plain)


def from_json(make: Callable[..., _P], text: str) -> _P:
    """Build a policy with ``make`` from the JSON that ``to_json`` wrote."""
    data = _json_object(text)
    for key in data:
        if key not in _KEYS:
            raise PolicyError(f"A policy's JSON has no {key!r}. {accepted(key, _KEYS)}")
    missing = [key for key in _KEYS if key not in data and key not in _OPTIONAL]
    if missing:
        raise PolicyError(f"This JSON is not a policy: it has no {', '.join(missing)}. {_ADVICE}")
    fields = _OPTIONAL | {key: value for key, value in data.items() if key != "version"}
    try:
        kinds = tuple((OpKind.parse(k), _cast_from(cast)) for k, cast in fields["kinds"].items())
        rules = tuple(Rule(**rule) for rule in fields["rules"])
        scaling = _scaling_from(fields["scaling"])
        return make(**{**fields, "kinds": kinds, "rules": rules, "scaling": scaling})
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


def _plain(value: Any) -> Any:
    """Return what ``json`` cannot write in words that ``from_json`` reads."""
    if isinstance(value, Precision):
        return value.short
    if isinstance(value, frozenset):
        return sorted(member.value for member in value)
    if hasattr(value, "to_data"):  # a rule, or the configuration of a kernel
        return value.to_data()
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _cast_from(data: str | dict[str, Any]) -> CastConfig:
    if isinstance(data, str):
        return CastConfig.plain(data)
    block = data["sf_block"]
    return CastConfig(data["out_dtype"], block and tuple(block), data["round_sf"])


def _scaling_from(data: dict[str, Any]) -> Scaling:
    fields: dict[str, Any] = {
        key: _cast_from(value) if key in ("weight", "gradient") and value else value
        for key, value in data.items()
    }
    return Scaling(**fields)
