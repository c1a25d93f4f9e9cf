"""Gradients of equinox modules: with respect to the floating arrays of the first argument."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxamp.training.grads import Gradient, grad, under_policy, value_and_grad
from jaxamp.transform import DEFAULT_POLICY


def filter_value_and_grad(
    fun: Callable[..., Any],
    has_aux: bool = False,
    *,
    policy: Any = DEFAULT_POLICY,
    loss_scale: Any = None,
    several: bool = False,
    microbatches: int = 1,
    batch_argnums: int | Sequence[int] = 1,
    clip_norm: float | None = None,
    axis_name: Any = None,
) -> Callable[..., Gradient]:
    """``equinox.filter_value_and_grad`` of `fun` in mixed precision, under a loss scale.

    Takes and returns what ``jaxamp.value_and_grad`` does; what is differentiated are the floating
    arrays of the first argument, and every other leaf of the gradients is ``None``.

    >>> import equinox as eqx, jax, jax.numpy as jnp
    >>> model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    >>> def loss_fn(model, x):
    ...     return jnp.mean(jax.vmap(model)(x) ** 2)
    >>> (loss, grads), finite, _ = filter_value_and_grad(loss_fn)(model, jnp.ones((4, 3)))
    >>> type(grads).__name__, grads.weight.shape
    ('Linear', (2, 3))
    """
    options = (has_aux, policy, loss_scale, several, microbatches, batch_argnums)
    return _filtered(value_and_grad, fun, *options, clip_norm, axis_name)


def filter_grad(
    fun: Callable[..., Any],
    has_aux: bool = False,
    *,
    policy: Any = DEFAULT_POLICY,
    loss_scale: Any = None,
    several: bool = False,
    microbatches: int = 1,
    batch_argnums: int | Sequence[int] = 1,
    clip_norm: float | None = None,
    axis_name: Any = None,
) -> Callable[..., Gradient]:
    """``equinox.filter_grad`` of `fun` in mixed precision, under a loss scale.

    Takes and returns what ``jaxamp.grad`` does, as ``filter_value_and_grad`` does.

    >>> import equinox as eqx, jax, jax.numpy as jnp
    >>> model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    >>> grads, finite, _ = filter_grad(lambda model, x: model(x).sum())(model, jnp.ones(3))
    >>> bool(finite)
    True
    """
    options = (has_aux, policy, loss_scale, several, microbatches, batch_argnums)
    return _filtered(grad, fun, *options, clip_norm, axis_name)


def _filtered(
    transform: Callable[..., Any],
    fun: Callable[..., Any],
    has_aux: bool,
    policy: Any,
    loss_scale: Any,
    several: bool,
    microbatches: int,
    batch_argnums: int | Sequence[int],
    clip_norm: float | None,
    axis_name: Any,
) -> Callable[..., Gradient]:
    import equinox as eqx  # here, so that whoever does not use it need not wait for it

    function = under_policy(fun, policy)

    @functools.wraps(fun, updated=())
    def gradients(model: Any, *args: Any, **kwargs: Any) -> Gradient:
        floats, rest = eqx.partition(model, eqx.is_inexact_array)

        def of_floats(floats: Any, *args: Any, **kwargs: Any) -> Any:
            return function(eqx.combine(floats, rest), *args, **kwargs)

        differentiated = transform(
            of_floats,
            has_aux=has_aux,
            policy=None,
            loss_scale=loss_scale,
            several=several,
            microbatches=microbatches,
            batch_argnums=batch_argnums,
            clip_norm=clip_norm,
            axis_name=axis_name,
        )
        return differentiated(floats, *args, **kwargs)

    return gradients
