"""Equations of a traced function with their whole scope paths, for tests about names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def equations_of(fn: Callable[..., Any], *args: Any) -> list[tuple[JaxprEqn, str]]:
    """Every equation of ``fn``, nested ones too, with its raw path from the outermost jaxpr on."""
    return list(_walk(jax.make_jaxpr(fn)(*args).jaxpr, ""))


def _walk(jaxpr: Jaxpr, outer: str) -> Iterator[tuple[JaxprEqn, str]]:
    for eqn in jaxpr.eqns:
        path = f"{outer}/{eqn.source_info.name_stack}"
        yield eqn, path
        for inner in _jaxprs(list(eqn.params.values())):
            yield from _walk(inner, path)


def _jaxprs(value: Any) -> Iterator[Jaxpr]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _jaxprs(item)
    elif isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
