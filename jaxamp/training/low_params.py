"""Optimizers of parameters narrower than float32: three ways in which small steps are not lost.

A float32 copy of the parameters is moved; or what rounding takes from a parameter is kept, and
given back later (Kahan); or parameters are rounded up or down by chance, right in the mean.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp.core.kept_rounding import reduce_to
from jaxamp.errors import TrainingError
from jaxamp.training.optax import as_transformation, transformation
from jaxamp.training.trees import is_float, map_floats, widen, widen_floats

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
        wide = None if params is None else state.master
        updates, moved = _moved(inner, "with_master_weights", updates, state, wide, extra)
        master = map_floats(operator.add, state.master, updates)
        updates = jax.tree.map(_step_to_master, params, master, updates)
        return updates, MasterWeightsState(master, moved)

    return transformation(init, update)


def _step_to_master(param: Any, master: Any, update: Any) -> Any:
    return _step_to(nearest(master, jnp.asarray(param).dtype), param) if is_float(param) else update


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
        nothing = jax.tree.map(lambda p: jnp.zeros_like(p) if _is_low(p) else jnp.zeros(0), params)
        return KahanState(nothing, inner.init(widen_floats(params)))

    def update(
        updates: Any, state: KahanState, params: Any = None, **extra: Any
    ) -> tuple[Any, KahanState]:
        updates, moved = _moved(inner, "with_kahan", updates, state, params, extra)
        pairs = jax.tree.map(_compensated, params, updates, state.compensation)
        updates, compensation = jax.tree.transpose(
            jax.tree.structure(params), jax.tree.structure((0, 0)), pairs
        )
        return updates, KahanState(compensation, moved)

    return transformation(init, update)


def _compensated(param: Any, update: Any, compensation: Any) -> tuple[Any, Any]:
    """Return the step to the rounded sum, and what the rounding took."""
    if not _is_low(param):
        return update, compensation
    wide, due = widen(param), update + widen(compensation)
    target = nearest(wide + due, param.dtype)
    lost = (wide - target) + due
    return _step_to(target, param), lost.astype(param.dtype)


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
    value = jnp.asarray(value)
    if value.dtype != jnp.float32:
        raise TrainingError(
            f"Stochastic rounding is from float32 to bfloat16, not from {value.dtype}."
        )
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
    noise = jax.random.bits(key, value.shape, jnp.uint16).astype(jnp.uint32)
    kept = (bits + noise) & np.uint32(0xFFFF0000)  # bfloat16 has no others
    rounded = jax.lax.bitcast_convert_type(kept, jnp.float32)
    return jnp.where(jnp.isfinite(value), rounded, value).astype(jnp.bfloat16)


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
        updates, moved = _moved(inner, "with_stochastic_rounding", updates, state, params, extra)
        key = jax.random.fold_in(jax.random.key(state.seed), state.step)
        leaves, treedef = jax.tree.flatten(params)
        keys = [jax.random.fold_in(key, index) for index in range(len(leaves))]
        updates = jax.tree.map(_rounded_step, params, updates, jax.tree.unflatten(treedef, keys))
        return updates, StochasticRoundingState(state.seed, state.step + 1, moved)

    return transformation(init, update)


def _rounded_step(param: Any, update: Any, key: jax.Array) -> Any:
    if not _is_low(param):
        return update
    if param.dtype != jnp.bfloat16:
        raise TrainingError(
            f"Parameters in {param.dtype} cannot be rounded stochastically; bfloat16 ones can. "
            "with_master_weights takes any dtype."
        )
    return _step_to(widen(stochastic_round(widen(param) + update, key)), param)


def _moved(
    inner: Any, name: str, updates: Any, state: Any, params: Any, extra: dict[str, Any]
) -> tuple[Any, Any]:
    """Return the step of the optimizer inside, in float32, and its next state."""
    if params is None:
        raise TrainingError(
            f"{name} rounds the parameters, so its update needs them: "
            "optimizer.update(grads, state, params)."
        )
    return inner.update(widen_floats(updates), state.inner_state, widen_floats(params), **extra)


def _is_low(leaf: Any) -> bool:
    """Return whether a floating leaf is narrower than float32."""
    return is_float(leaf) and jnp.asarray(leaf).dtype.itemsize < 4


def nearest(value: jax.Array, dtype: Any) -> jax.Array:
    """Return the nearest number of `dtype`, as float32.

    A cast there and back would say the same, but XLA may leave such a pair out.

    >>> float(nearest(jnp.float32(257), jnp.bfloat16))
    256.0
    """
    dtype = jnp.dtype(dtype)
    if dtype.itemsize >= 4:
        return value
    reduced = reduce_to(value, dtype)
    if reduced is not None:
        return reduced
    return jax.lax.optimization_barrier(value.astype(dtype)).astype(jnp.float32)


def _step_to(target: jax.Array, param: Any) -> jax.Array:
    """Return the update that takes `param` to `target`, in float32.

    Added to `param` and rounded it gives `target` bit by bit, unless `param` becomes smaller by a
    factor of more than 2¹⁵ at once.
    """
    return target - widen(param)
