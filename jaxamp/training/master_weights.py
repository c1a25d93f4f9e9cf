"""Master weights: a float32 copy of narrow parameters, which is what the optimizer moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from jaxamp.training.transformation import (
    as_transformation,
    map_params,
    nearest,
    needs_params,
    step_to,
    transformation,
)
from jaxamp.training.trees import map_floats, widen, widen_floats

if TYPE_CHECKING:
    import optax


class MasterWeightsState(NamedTuple):
    """State of ``with_master_weights``.

    Attributes:
      master: the parameters in float32.
      inner_state: state of the optimizer inside.
    """

    master: Any
    inner_state: Any


def with_master_weights(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that keeps a float32 copy of the parameters and moves that.

    The model keeps its own dtype: after every step each parameter is the nearest number to its
    master, so that steps too small to show add up. Gradients and moments are float32.

    Args:
      optimizer: any of optax; it sees the masters only.

    Returns:
      A gradient transformation, whose updates go to ``optax.apply_updates``: it keeps dtypes, where
      equinox's own widens. ``state.master`` are the weights to save.

    Raises:
      TrainingError: `optimizer` is none of optax, or an update is asked for without `params`.

    >>> import optax
    >>> optimizer = with_master_weights(optax.sgd(1.0))
    >>> params = jnp.ones((), jnp.bfloat16)
    >>> state = optimizer.init(params)
    >>> for _ in range(4):
    ...     updates, state = optimizer.update(jnp.bfloat16(0.001), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> float(params), round(float(state.master), 4)
    (0.99609375, 0.996)
    """
    inner = as_transformation(optimizer)

    def init(params: Any) -> MasterWeightsState:
        # A copy also of what is float32 already: a donated buffer may have one owner only.
        master = map_floats(lambda leaf: jnp.array(widen(leaf), copy=True), params)
        return MasterWeightsState(master, inner.init(master))

    def update(
        updates: Any, state: MasterWeightsState, params: Any = None, **extra: Any
    ) -> tuple[Any, MasterWeightsState]:
        params = needs_params(params, "with_master_weights")
        grads = widen_floats(updates)
        updates, moved = inner.update(grads, state.inner_state, state.master, **extra)
        master = map_params(lambda m, u: m + u, state.master, updates)
        updates = map_params(
            lambda p, m: step_to(nearest(m, jnp.asarray(p).dtype), p), params, master
        )
        return updates, MasterWeightsState(master, moved)

    return transformation(init, update)
