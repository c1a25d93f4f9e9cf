"""What a loss scale does, step by step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp.training import DynamicLossScale


def our_trajectory(script: Any, scale: DynamicLossScale) -> list[tuple[np.float32, int]]:
    """Scales and counts after each step, all steps in one compiled scan."""

    def step(scale: DynamicLossScale, finite: jax.Array) -> Any:
        scale = scale.adjust(finite)
        return scale, (scale.loss_scale, scale.counter)

    _, (scales, counts) = jax.jit(lambda s, x: jax.lax.scan(step, s, x))(scale, jnp.array(script))
    return list(zip(np.asarray(scales), np.asarray(counts).tolist(), strict=True))
