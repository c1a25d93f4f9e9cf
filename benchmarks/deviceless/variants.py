"""The four programs that are compared for every model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from benchmarks.deviceless.models.model import Loss, Size
from jaxamp import amp

POLICY = "auto_mixed_bf16"
HAND = "hand-written"


def _gradient(fn: Loss) -> Callable[..., Any]:
    return jax.value_and_grad(fn, has_aux=True)


VARIANTS: dict[str, Callable[[Size], Callable[..., Any]]] = {
    "float32": lambda size: _gradient(size.plain),
    HAND: lambda size: _gradient(size.hand),
    "grad(amp(f))": lambda size: _gradient(amp(size.plain, POLICY)),
    "amp(grad(f))": lambda size: amp(_gradient(size.plain), POLICY),
}
