"""The programs that are compared for a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from benchmarks.deviceless.models.model import Loss, Size
from jaxamp import amp

POLICY = "auto_mixed_bf16"
PLAIN = "float32"
ORDERS = ("grad(amp(f))", "amp(grad(f))")


def variants(size: Size) -> dict[str, Callable[..., Any]]:
    """Loss and gradient in float32, by hand, and by jaxamp in both orders."""
    return {
        PLAIN: _gradient(size.plain),
        **{name: _gradient(fn) for name, fn in size.hands.items()},
        ORDERS[0]: _gradient(amp(size.plain, POLICY)),
        ORDERS[1]: amp(_gradient(size.plain), POLICY),
    }


def _gradient(fn: Loss) -> Callable[..., Any]:
    return jax.value_and_grad(fn, has_aux=True)
