"""The programs that are compared for a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from benchmarks.deviceless.models.fused import FUSED
from benchmarks.deviceless.models.model import Loss, Size
from jaxamp import PrecisionPolicy, amp

POLICY = PrecisionPolicy.parse("mixed_bf16").replace(fused_attention=False)
PLAIN = "float32"
ORDERS = ("grad(amp(f))", "amp(grad(f))")
FORWARD = "amp(f)"
FUSED_ORDERS = tuple(f"{order}, fused attention" for order in ORDERS)


def variants(size: Size) -> dict[str, Callable[..., Any]]:
    """Loss and gradient in float32, by hand, and by jaxamp in both orders.

    What attends is there twice: as it is, and with attention that jaxamp finds and fuses.
    """
    if not size.gradient:
        return {PLAIN: size.plain, **size.hands, FORWARD: amp(size.plain, POLICY)}
    programs = {
        PLAIN: _gradient(size.plain),
        **{name: _gradient(fn) for name, fn in size.hands.items()},
        **_both(size, ORDERS, POLICY),
    }
    if FUSED in size.hands:
        programs |= _both(size, FUSED_ORDERS, POLICY.replace(fused_attention=True))
    return programs


def _both(
    size: Size, names: tuple[str, ...], policy: PrecisionPolicy
) -> dict[str, Callable[..., Any]]:
    inside, around = names
    return {
        inside: _gradient(amp(size.plain, policy)),
        around: amp(_gradient(size.plain), policy),
    }


def _gradient(fn: Loss) -> Callable[..., Any]:
    return jax.value_and_grad(fn, has_aux=True)
