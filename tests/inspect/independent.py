"""Counting again, from the rewritten program rather than from the plan."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

_DOT = re.compile(
    r"stablehlo\.(?:dot_general|convolution).*?: \(tensor<([^>]*)>, tensor<[^>]*>\)", re.DOTALL
)
_WORDS = {"bf16": "bf16", "f16": "f16", "f32": "f32", "f64": "f64"}


def lowered_dots(fn: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, int]:
    """Dots and convolutions in the program that goes to a GPU's compiler, by operand format."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return dict(Counter(_WORDS[found.split("x")[-1]] for found in _DOT.findall(text)))
