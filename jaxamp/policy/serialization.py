"""Policies as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, TypeVar

from jaxamp.core import features
from jaxamp.core.formats import CastConfig, Precision
from jaxamp.core.taxonomy import OpKind
from jaxamp.errors import PolicyError, accepted, shown
from jaxamp.policy.rules import Rule

_P = TypeVar("_P")

_VERSION = 1
_KEYS = (
    "version", "name", "kinds", "accumulation", "rules", "guards", "param_dtype", "output_dtype",
    "allreduce",
)  # fmt: skip
_TYPES = {"name": str, "kinds": dict, "rules": list, "guards": list}
_ADVICE = "PrecisionPolicy.to_json() writes one; a preset needs none: amp(fn, 'mixed_bf16')."


def to_json(policy: Any) -> str:
    """Return a policy as JSON."""
    keys = *_KEYS[1:], *features.fields()
    data = {"version": _VERSION} | {key: getattr(policy, key) for key in keys}
    data["kinds"] = {kind.value: cast for kind, cast in policy.kinds}
    return json.dumps(data, indent=2, default=_plain)


def from_json(make: Callable[..., _P], text: str) -> _P:
    """Build a policy with ``make`` from the JSON that ``to_json`` wrote."""
    data, added = _json_object(text), features.fields()
    for key in data:
        if key not in (*_KEYS, *added):
            lacking = features.lacking(key)
            raise PolicyError(
                f"A policy's JSON has no {key!r}. {lacking}{accepted(key, [*_KEYS, *added])}"
            )
    missing = [key for key in _KEYS if key not in data]
    if missing:
        raise PolicyError(f"This JSON is not a policy: it has no {', '.join(missing)}. {_ADVICE}")
    fields = {key: data[key] for key in _KEYS[1:]}
    try:
        kinds = tuple(
            (OpKind.parse(k), CastConfig.from_data(cast)) for k, cast in fields["kinds"].items()
        )
        rules = tuple(Rule(**rule) for rule in fields["rules"])
        others = {key: field.from_data(data[key]) for key, field in added.items() if key in data}
        return make(**{**fields, "kinds": kinds, "rules": rules, "features": others})
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
    if hasattr(value, "to_data"):  # a rule
        return value.to_data()
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
