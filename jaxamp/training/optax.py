"""Optimizers that leave out a step whose gradients are not finite, counters, schedules and all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxamp.core.keep_precision import keep_precision
from jaxamp.errors import TrainingError
from jaxamp.training.loss_scale import DynamicLossScale, as_loss_scale
from jaxamp.training.trees import all_finite, as_flag, map_floats, select_tree, widen_floats

if TYPE_CHECKING:
    import optax


class SkipState(NamedTuple):
    """State of ``skip_nonfinite``.

    Attributes:
      grads_finite: whether the last gradients were finite, bool[].
      skipped: steps left out so far, i32[].
      inner_state: state of the optimizer inside.
    """

    grads_finite: jax.Array
    skipped: jax.Array
    inner_state: Any


class LossScaleState(NamedTuple):
    """State of ``with_loss_scale``.

    Attributes:
      loss_scale: the loss scale for the next loss.
      skip: what was skipped, with the state of the optimizer inside.
    """

    loss_scale: Any
    skip: SkipState

    @property
    def grads_finite(self) -> jax.Array:
        """Return whether the last gradients were finite, bool[]."""
        return self.skip.grads_finite

    @property
    def inner_state(self) -> Any:
        """State of the optimizer inside."""
        return self.skip.inner_state


def skip_nonfinite(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that leaves out every step whose gradients are not all finite.

    Parameters, moments, counters and schedules are then, bit by bit, what they were. For gradients
    that are unscaled already, as ``scaled_value_and_grad`` gives them; pass its flag on, or leave
    it to be found out: ``update(grads, state, params, grads_finite=finite)``. Both outcomes are
    selected from on the device, so nothing waits, and under ``vmap`` each member skips by itself.

    Args:
      optimizer: any of optax. All that counts steps belongs inside, schedules and ``MultiSteps``
        too.

    Returns:
      A gradient transformation; what it skips gives updates of zero.

    Raises:
      TrainingError: `optimizer` is none of optax, or `grads_finite` is no boolean scalar.

    >>> import optax
    >>> optimizer = skip_nonfinite(optax.adam(0.1))
    >>> state = optimizer.init(jnp.ones(2))
    >>> updates, state = optimizer.update(jnp.array([1.0, jnp.nan]), state)
    >>> bool((updates == 0).all()), int(state.skipped), int(state.inner_state[0].count)
    (True, 1, 0)
    """
    inner = as_transformation(optimizer)

    def init(params: Any) -> SkipState:
        return SkipState(jnp.array(True), jnp.int32(0), inner.init(params))

    def update(
        updates: Any,
        state: SkipState,
        params: Any = None,
        *,
        grads_finite: Any = None,
        **extra: Any,
    ) -> tuple[Any, SkipState]:
        finite = as_flag(all_finite(updates) if grads_finite is None else grads_finite)
        updates, moved = inner.update(updates, state.inner_state, params, **extra)
        skipped = jnp.where(finite, state.skipped, state.skipped + 1)
        kept = select_tree(finite, moved, state.inner_state)
        # Minus zero, for only that leaves a parameter of minus zero as it is.
        updates = map_floats(lambda u: jnp.where(finite, u, jnp.array(-0.0, u.dtype)), updates)
        return updates, SkipState(finite, skipped, kept)

    return transformation(init, update)


def with_loss_scale(
    optimizer: Any, loss_scale: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer for the gradients of a scaled loss.

    It divides them by the scale, in float32, leaves the step out where they are not all finite as
    ``skip_nonfinite`` does, and adjusts the scale, which is part of its state.

    Args:
      optimizer: any of optax, clipping, schedules and ``MultiSteps`` included.
      loss_scale: the first loss scale, of jaxamp or jmp; ``None`` for ``DynamicLossScale()``.

    Returns:
      A gradient transformation. Scale the loss by its state: ``state.loss_scale.scale(loss)``.

    Raises:
      TrainingError: `optimizer` is not an optimizer, or `loss_scale` not a loss scale.

    >>> import optax
    >>> optimizer = with_loss_scale(optax.sgd(1.0))
    >>> params = jnp.float32(3)
    >>> state = optimizer.init(params)
    >>> grads = jax.grad(lambda w: state.loss_scale.scale(w**2))(params)
    >>> updates, state = optimizer.update(grads, state, params)
    >>> float(grads), float(updates)
    (196608.0, -6.0)
    """
    skipping = skip_nonfinite(optimizer)
    first = as_loss_scale(DynamicLossScale() if loss_scale is None else loss_scale)

    def init(params: Any) -> LossScaleState:
        skip: Any = skipping.init(params)
        return LossScaleState(jax.tree.map(jnp.array, first), skip)

    def update(
        updates: Any, state: LossScaleState, params: Any = None, **extra: Any
    ) -> tuple[Any, LossScaleState]:
        scale = state.loss_scale
        grads = widen_floats(scale.unscale(updates))
        skip: Any
        updates, skip = skipping.update(grads, state.skip, params, **extra)
        return updates, LossScaleState(scale.adjust(skip.grads_finite), skip)

    return transformation(init, update)


def transformation(
    init: Callable[..., Any], update: Callable[..., Any]
) -> optax.GradientTransformationExtraArgs:
    """Return a gradient transformation that computes in float32 also inside ``amp``."""
    import optax  # here, so that whoever does not use it need not wait for it

    return optax.GradientTransformationExtraArgs(init, keep_precision("f32")(update))


def as_transformation(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Convert any optimizer of optax, ``MultiSteps`` included, to one with extra arguments."""
    import optax

    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TrainingError(
            f"{optimizer!r} is not an optimizer. Give a gradient transformation of optax: "
            "optax.adam(1e-3)."
        )
    return optax.with_extra_args_support(optimizer)
