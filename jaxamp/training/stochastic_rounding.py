"""Stochastic rounding: up or down by chance, so that the mean is the number itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp.errors import TrainingError
from jaxamp.training.transformation import (
    as_transformation,
    is_low,
    needs_params,
    step_to,
    transformation,
)
from jaxamp.training.trees import widen, widen_floats

if TYPE_CHECKING:
    import optax

_DROPPED = 16  # bits of float32's significand that bfloat16 does not have


class StochasticRoundingState(NamedTuple):
    """State of ``with_stochastic_rounding``.

    Attributes:
      seed: of the random numbers, u32[].
      step: steps so far, i32[].
      inner_state: state of the optimizer inside.
    """

    seed: jax.Array
    step: jax.Array
    inner_state: Any


def stochastic_round(value: Any, key: jax.Array) -> jax.Array:
    """Return one of the two bfloat16 neighbours of each number, the nearer one more likely.

    Args:
      value: f32[...].
      key: a random key.

    Returns:
      bf16[...], whose mean over keys is `value`. Numbers of bfloat16, infinities and NaN stay.

    Raises:
      TrainingError: `value` is not float32.

    >>> values = jnp.full(10_000, 1.001, jnp.float32)  # 1 and 1.0078125 are the neighbours
    >>> rounded = stochastic_round(values, jax.random.key(0))
    >>> round(float(rounded.astype(jnp.float32).mean()), 4)
    1.001
    """
    return stochastic_value(value, key).astype(jnp.bfloat16)


def stochastic_value(value: Any, key: jax.Array) -> jax.Array:
    """Round as ``stochastic_round`` does, but return float32."""
    value = jnp.asarray(value)
    if value.dtype != jnp.float32:
        raise TrainingError(
            f"Stochastic rounding is from float32 to bfloat16, not from {value.dtype}."
        )
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
    noise = jax.random.bits(key, value.shape, jnp.uint16).astype(jnp.uint32)
    kept = (bits + noise) & np.uint32((0xFFFFFFFF << _DROPPED) & 0xFFFFFFFF)
    rounded = jax.lax.bitcast_convert_type(kept, jnp.float32)
    return jnp.where(jnp.isfinite(value), rounded, value)


def with_stochastic_rounding(
    optimizer: Any, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer for bfloat16 parameters of which there is no float32 copy.

    Each step is computed in float32 and the new parameters are rounded stochastically: a step of a
    tenth of the distance between two neighbours is taken one time in ten. Moments are float32.

    Args:
      optimizer: any of optax.
      seed: of the random numbers, which depend on it, the step and the parameter only, so that a
        run that is resumed goes on bit by bit.

    Returns:
      A gradient transformation, for parameters in bfloat16; those in float32 or wider are moved as
      ever. Its updates go to ``optax.apply_updates``.

    Raises:
      TrainingError: `optimizer` is none of optax, a parameter is float16, or an update is asked for
        without `params`.

    >>> import optax
    >>> optimizer = with_stochastic_rounding(optax.sgd(1.0))
    >>> params = jnp.ones(10_000, jnp.bfloat16)
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update(jnp.full(10_000, 0.001, jnp.bfloat16), state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> params.dtype, round(float(params.astype(jnp.float32).mean()), 4)
    (dtype(bfloat16), 0.999)
    """
    inner = as_transformation(optimizer)

    def init(params: Any) -> StochasticRoundingState:
        inner_state = inner.init(widen_floats(params))
        return StochasticRoundingState(jnp.uint32(seed), jnp.int32(0), inner_state)

    def update(
        updates: Any, state: StochasticRoundingState, params: Any = None, **extra: Any
    ) -> tuple[Any, StochasticRoundingState]:
        params = needs_params(params, "with_stochastic_rounding")
        wide = widen_floats(params)
        updates, moved = inner.update(widen_floats(updates), state.inner_state, wide, **extra)
        key = jax.random.fold_in(jax.random.key(state.seed), state.step)
        updates = _rounded_steps(params, updates, key)
        return updates, StochasticRoundingState(state.seed, state.step + 1, moved)

    return transformation(init, update)


def _rounded_steps(params: Any, updates: Any, key: jax.Array) -> Any:
    leaves, treedef = jax.tree.flatten(params)
    steps = [
        _rounded_step(param, update, jax.random.fold_in(key, index))
        for index, (param, update) in enumerate(
            zip(leaves, treedef.flatten_up_to(updates), strict=True)
        )
    ]
    return jax.tree.unflatten(treedef, steps)


def _rounded_step(param: Any, update: Any, key: jax.Array) -> Any:
    if not is_low(param):
        return update
    if param.dtype != jnp.bfloat16:
        raise TrainingError(
            f"Parameters in {param.dtype} cannot be rounded stochastically; bfloat16 ones can. "
            "with_master_weights takes any dtype."
        )
    return step_to(stochastic_value(widen(param) + update, key), param)
