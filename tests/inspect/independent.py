"""Counting again, from the rewritten program rather than from the plan."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

_DOT = re.compile(
    r"stablehlo\.(?:dot_general|convolution).*?: \(tensor<([^>]*)>, tensor<[^>]*>\)", re.DOTALL
)
_WORDS = {"bf16": "bf16", "f16": "f16", "f32": "f32", "f64": "f64"}


def equations(jaxpr: Jaxpr, runs: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """Every equation, nested ones too, and how often it runs."""
    for eqn in jaxpr.eqns:
        yield eqn, runs
        inside = runs * eqn.params.get("length", 1)
        for value in eqn.params.values():
            for body in value if isinstance(value, tuple) else (value,):
                if isinstance(body, ClosedJaxpr):
                    yield from equations(body.jaxpr, inside)
                elif isinstance(body, Jaxpr):
                    yield from equations(body, inside)


def casts(fn: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Conversions between float formats in a program."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return sum(runs for eqn, runs in equations(jaxpr) if _is_cast(eqn))


def _is_cast(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    given, made = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    floats = jnp.issubdtype(given, jnp.floating) and jnp.issubdtype(made, jnp.floating)
    return floats and given != made


def lowered_dots(fn: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, int]:
    """Dots and convolutions in the program that goes to a GPU's compiler, by operand format."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return dict(Counter(_WORDS[found.split("x")[-1]] for found in _DOT.findall(text)))
