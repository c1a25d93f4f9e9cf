"""jmp's loss scales: to and from ours."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import jmp

from jaxamp.errors import TrainingError
from jaxamp.training.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale


def loss_scale_from_jmp(scale: Any) -> Any:
    """Convert a jmp loss scale, its floor included.

    Convert before ``jit``: jmp's own object comes out of every compiled function with its floor
    back at 1.

    Raises:
      TrainingError: it is not a loss scale of jmp.

    >>> float(loss_scale_from_jmp(jmp.DynamicLossScale(2.0**15)).loss_scale)
    32768.0
    """
    if isinstance(scale, jmp.DynamicLossScale):
        return DynamicLossScale(
            scale.loss_scale, scale.counter, scale.period, scale.factor, scale.min_loss_scale
        )
    if isinstance(scale, jmp.StaticLossScale):
        return StaticLossScale(scale.loss_scale)
    if isinstance(scale, jmp.NoOpLossScale):
        return NoOpLossScale()
    raise TrainingError(f"{scale!r} is not a loss scale of jmp.")


def loss_scale_to_jmp(scale: Any) -> Any:
    """Return the jmp loss scale nearest to ours; a ceiling and a backoff have no place there.

    >>> loss_scale_to_jmp(NoOpLossScale())
    NoOpLossScale()
    """
    if isinstance(scale, DynamicLossScale):
        floor = jnp.asarray(scale.min_loss_scale)
        numbers: tuple[Any, ...] = (scale.counter, scale.period, scale.factor, floor)
        return jmp.DynamicLossScale(jnp.asarray(scale.loss_scale), *numbers)
    if isinstance(scale, StaticLossScale):
        return jmp.StaticLossScale(scale.loss_scale)
    if isinstance(scale, NoOpLossScale):
        return jmp.NoOpLossScale()
    raise TrainingError(f"{scale!r} is not a loss scale of jaxamp.")
