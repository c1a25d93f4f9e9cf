"""Kahan compensation: what rounding takes from a parameter is kept, and given back later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxamp.training.transformation import (
    as_transformation,
    is_low,
    nearest,
    needs_params,
    step_to,
    transformation,
)
from jaxamp.training.trees import widen, widen_floats

if TYPE_CHECKING:
    import optax


class KahanState(NamedTuple):
    """State of ``with_kahan``.

    Attributes:
      compensation: what rounding took from each narrow parameter, in the parameter's dtype; empty
        arrays for the others.
      inner_state: state of the optimizer inside.
    """

    compensation: Any
    inner_state: Any


def with_kahan(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer for narrow parameters of which there is no float32 copy.

    Each step is computed in float32; what is lost when the new parameter is rounded is kept beside
    it, in the same narrow dtype, and added to the next step: two bytes a parameter, where a
    float32 copy takes four. Moments are float32.

    Args:
      optimizer: any of optax.

    Returns:
      A gradient transformation; parameters in float32 or wider are moved as ever. Its updates go
      to ``optax.apply_updates``.

    Raises:
      TrainingError: `optimizer` is none of optax, or an update is asked for without `params`.

    >>> import optax
    >>> optimizer = with_kahan(optax.sgd(1.0))
    >>> params = jnp.ones((), jnp.bfloat16)
    >>> state = optimizer.init(params)
    >>> for _ in range(4):
    ...     updates, state = optimizer.update(jnp.bfloat16(0.001), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> float(params), round(float(params + state.compensation.astype(jnp.float32)), 4)
    (0.99609375, 0.996)
    """
    inner = as_transformation(optimizer)

    def init(params: Any) -> KahanState:
        return KahanState(jax.tree.map(_no_compensation, params), inner.init(widen_floats(params)))

    def update(
        updates: Any, state: KahanState, params: Any = None, **extra: Any
    ) -> tuple[Any, KahanState]:
        params = needs_params(params, "with_kahan")
        wide = widen_floats(params)
        updates, moved = inner.update(widen_floats(updates), state.inner_state, wide, **extra)
        pairs = jax.tree.map(_compensated, params, updates, state.compensation)
        updates, compensation = jax.tree.transpose(
            jax.tree.structure(params), jax.tree.structure((0, 0)), pairs
        )
        return updates, KahanState(compensation, moved)

    return transformation(init, update)


def _no_compensation(param: Any) -> jax.Array:
    return jnp.zeros_like(param) if is_low(param) else jnp.zeros(0)


def _compensated(param: Any, update: Any, compensation: Any) -> tuple[Any, Any]:
    """Return the step to the rounded sum, and what the rounding took."""
    if not is_low(param):
        return update, compensation
    wide, due = widen(param), update + widen(compensation)
    target = nearest(wide + due, param.dtype)
    lost = (wide - target) + due
    return step_to(target, param), lost.astype(param.dtype)
