"""Gradients of equinox modules: with respect to the floating arrays of the first argument."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Unpack

from jaxamp.run.amp import DEFAULT_POLICY
from jaxamp.training.grads import (
    Gradient,
    NamedOptions,
    scaled_grad,
    scaled_value_and_grad,
    under_policy,
)


def scaled_filter_value_and_grad(
    fun: Callable[..., Any], has_aux: bool = False, **options: Unpack[NamedOptions]
) -> Callable[..., Gradient]:
    """Differentiate as ``equinox.filter_value_and_grad``, in mixed precision with a loss scale.

    As ``scaled_value_and_grad``; but what is differentiated are the floating arrays of the first
    argument.

    Args:
      fun: a function of a module or any other tree, and more. It returns a scalar loss, or
        ``(loss, aux)`` with `has_aux`.
      has_aux: whether `fun` returns something besides the loss.
      **options: options of ``scaled_value_and_grad``, such as `policy` and `loss_scale`.

    Returns:
      A function of `fun`'s arguments. It returns ``((loss, grads), grads_finite, loss_scale)``,
      with `has_aux` ``(((loss, aux), grads), grads_finite, loss_scale)``. The gradients have the
      structure of the first argument, with ``None`` for what is not a floating array.

    Raises:
      TrainingError: something is not a loss scale, or the policy keeps a history.

    >>> import equinox as eqx, jax, jax.numpy as jnp
    >>> model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    >>> def loss_fn(model, x):
    ...     return jnp.mean(jax.vmap(model)(x) ** 2)
    >>> (loss, grads), finite, _ = scaled_filter_value_and_grad(loss_fn)(model, jnp.ones((4, 3)))
    >>> type(grads).__name__, grads.weight.shape
    ('Linear', (2, 3))
    """
    return _filtered(scaled_value_and_grad, fun, has_aux, **options)


def scaled_filter_grad(
    fun: Callable[..., Any], has_aux: bool = False, **options: Unpack[NamedOptions]
) -> Callable[..., Gradient]:
    """Differentiate as ``equinox.filter_grad``, in mixed precision with a loss scale.

    As ``scaled_filter_value_and_grad``, without the loss among the results.

    Args:
      fun: a function of a module or any other tree, and more. It returns a scalar loss, or
        ``(loss, aux)`` with `has_aux`.
      has_aux: whether `fun` returns something besides the loss.
      **options: options of ``scaled_value_and_grad``, such as `policy` and `loss_scale`.

    Returns:
      A function of `fun`'s arguments. It returns ``(grads, grads_finite, loss_scale)``, and with
      `has_aux` ``((grads, aux), grads_finite, loss_scale)``. The gradients have the structure of
      the first argument, with ``None`` for what is not a floating array.

    Raises:
      TrainingError: something is not a loss scale, or the policy keeps a history.

    >>> import equinox as eqx, jax, jax.numpy as jnp
    >>> model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    >>> grads, finite, _ = scaled_filter_grad(lambda model, x: model(x).sum())(model, jnp.ones(3))
    >>> bool(finite)
    True
    """
    return _filtered(scaled_grad, fun, has_aux, **options)


def _filtered(
    transform: Callable[..., Any],
    fun: Callable[..., Any],
    has_aux: bool,
    policy: Any = DEFAULT_POLICY,
    **options: Any,
) -> Callable[..., Gradient]:
    import equinox as eqx  # here, so that whoever does not use it need not wait for it

    function = under_policy(fun, policy)

    @functools.wraps(fun, updated=())
    def gradients(model: Any, *args: Any, **kwargs: Any) -> Gradient:
        floats, rest = eqx.partition(model, eqx.is_inexact_array)

        def of_floats(floats: Any, *args: Any, **kwargs: Any) -> Any:
            return function(eqx.combine(floats, rest), *args, **kwargs)

        return transform(of_floats, has_aux=has_aux, policy=None, **options)(
            floats, *args, **kwargs
        )

    return gradients
