"""Gradients in mixed precision: scaled on the way, unscaled, checked, in float32."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp

from jaxamp.core.keep_precision import keep_precision
from jaxamp.errors import TrainingError, article, shown
from jaxamp.run.amp import DEFAULT_POLICY, amp
from jaxamp.training.loss_scale import as_loss_scale
from jaxamp.training.trees import all_finite, global_norm, map_floats, varies_over, widen_floats


class Gradient(NamedTuple):
    """Result of ``scaled_grad`` and ``scaled_value_and_grad``.

    Attributes:
      result: what ``jax.grad`` or ``jax.value_and_grad`` returns, gradients in float32.
      grads_finite: whether every gradient is finite, bool[].
      loss_scale: the loss scale for the next step.
    """

    result: Any
    grads_finite: jax.Array
    loss_scale: Any


class NamedOptions(TypedDict, total=False):
    """Options that are given by name; ``scaled_value_and_grad`` says what they are."""

    policy: Any
    loss_scale: Any
    clip_norm: float | None
    axis_name: Any


def scaled_value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    policy: Any = DEFAULT_POLICY,
    loss_scale: Any = None,
    clip_norm: float | None = None,
    axis_name: Any = None,
) -> Callable[..., Gradient]:
    """Differentiate as ``jax.value_and_grad``, in mixed precision with a loss scale.

    The loss is computed under `policy`, multiplied by the scale, and differentiated; the gradients
    come to float32, are divided by the scale that was used, checked, and clipped, in that order.
    The loss that is returned was never scaled. Nothing waits for the device.

    Args:
      fun: returns a scalar loss, or ``(loss, aux)`` with `has_aux`.
      argnums: which positional arguments to differentiate.
      has_aux: whether `fun` returns something besides the loss.
      policy: as for ``amp``; ``None`` leaves `fun` as it is.
      loss_scale: a loss scale of jaxamp or jmp, or an object with their methods; ``None`` for none.
      clip_norm: largest global norm of the unscaled gradients. With `axis_name` it is that of the
        whole gradients, which types tell from those that are split.
      axis_name: mapped axes (of ``shard_map`` or ``pmap``) over which gradients differ, as they do
        where parameters are split by hand: flag and loss scale are then the same on all devices.
        Not needed under ``jit``, sharded or not.

    Returns:
      A function of `fun`'s arguments. It returns ``((loss, grads), grads_finite, loss_scale)``,
      with `has_aux` ``(((loss, aux), grads), grads_finite, loss_scale)``: what
      ``jax.value_and_grad`` gives, whether all gradients are finite, and the next loss scale, of
      the type that was given. Gradients are float32, or wider where the argument is.

    Raises:
      TrainingError: something is not a loss scale, the policy keeps a history, or an argument is a
        module of flax nnx, which has state: take ``nnx.value_and_grad`` inside of ``amp``.

    >>> import jax.numpy as jnp, jaxamp
    >>> def loss_fn(w, x):
    ...     return jnp.mean((x @ w) ** 2)
    >>> scale = jaxamp.training.DynamicLossScale()
    >>> step = scaled_value_and_grad(loss_fn, policy="mixed_f16", loss_scale=scale)
    >>> (loss, grads), finite, scale = step(jnp.ones((4, 2)), jnp.full((4, 4), 0.25))
    >>> float(loss), grads.dtype, bool(finite), int(scale.counter)
    (1.0, dtype('float32'), True, 1)
    """
    scale, function = as_loss_scale(loss_scale), under_policy(fun, policy)

    def scaled(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        return scale.scale(_with_aux(value)[0] if has_aux else value), value

    @functools.wraps(fun, updated=())
    def gradients(*args: Any, **kwargs: Any) -> Gradient:
        _refuse_nnx((args, kwargs))
        _refuse_options(fun, kwargs)
        (_, value), grads = jax.value_and_grad(scaled, argnums, has_aux=True)(*args, **kwargs)
        grads = widen_floats(scale.unscale(grads))
        finite = all_finite(grads, axis_name=axis_name)
        if clip_norm is not None:
            grads = clip_by_norm(grads, clip_norm, axis_name)
        return Gradient((value, grads), finite, scale.adjust(finite))

    return gradients


def scaled_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Unpack[NamedOptions],
) -> Callable[..., Gradient]:
    """Differentiate as ``jax.grad``, in mixed precision with a loss scale.

    As ``scaled_value_and_grad``, without the loss in the results.

    Args:
      fun: returns a scalar loss, or ``(loss, aux)`` with `has_aux`.
      argnums: which positional arguments to differentiate.
      has_aux: whether `fun` returns something besides the loss.
      **options: options of ``scaled_value_and_grad``, such as `policy` and `loss_scale`.

    Returns:
      A function of `fun`'s arguments. It returns ``(grads, grads_finite, loss_scale)``, and with
      `has_aux` ``((grads, aux), grads_finite, loss_scale)``: what ``jax.grad`` gives, whether all
      gradients are finite, and the next loss scale, of the type that was given.

    Raises:
      TrainingError: something is not a loss scale, or the policy keeps a history.

    >>> from jaxamp.training import StaticLossScale
    >>> grads, finite, _ = scaled_grad(lambda x: x**2, loss_scale=StaticLossScale(8))(3.0)
    >>> float(grads)
    6.0
    """
    with_value = scaled_value_and_grad(fun, argnums, has_aux, **options)

    @functools.wraps(fun, updated=())
    def gradients(*args: Any, **kwargs: Any) -> Gradient:
        (value, grads), finite, adjusted = with_value(*args, **kwargs)
        return Gradient((grads, value[1]) if has_aux else grads, finite, adjusted)

    return gradients


def under_policy(fun: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    """Wrap `fun` in ``amp``, or return it as it is where there is no policy.

    Raises:
      TrainingError: the policy keeps a history, to which gradients belong.
    """
    function: Any = fun if policy is None else amp(fun, policy)
    if getattr(function, "takes_history", False):
        raise TrainingError(
            f"Under {function.policy} a step takes and returns a history, and the magnitudes of "
            "its gradients are part of it. Put amp around the step that takes its own gradient, "
            "amp(step, policy), or choose 'fp8_current', which has no history."
        )
    return function


def _with_aux(value: Any) -> tuple[Any, Any]:
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    raise TrainingError(f"With has_aux=True a function returns (loss, aux), not {shown(value)}.")


@keep_precision("f32")
def clip_by_norm(grads: Any, limit: float, axis_name: Any = None) -> Any:
    """Shrink all gradients together so that their global norm is at most `limit`.

    Args:
      grads: any tree.
      limit: above zero.
      axis_name: mapped axes of ``shard_map`` over which some of the gradients are split: the norm
        is that of the whole gradients, and the same on all devices.

    Raises:
      TrainingError: `limit` is not above zero, or types do not say what is split.

    >>> import numpy as np
    >>> clip_by_norm({"a": np.float32(3), "b": np.float32(4)}, 1.0)["b"].item()
    0.800000011920929
    """
    if not limit > 0:
        raise TrainingError(f"The largest norm of gradients is above 0, not {limit!r}.")
    if axis_name is not None and not varies_over(jax.lax.axis_index(axis_name)):
        raise TrainingError(
            f"clip_norm needs to know which gradients are split over {axis_name!r}, and under "
            "pmap, vmap and shard_map(check_vma=False) their types do not say. Leave check_vma on, "
            "or clip afterwards by a norm of your own."
        )
    norm = global_norm(grads, axis_name)
    factor = jnp.where(norm > limit, limit / norm, 1.0)
    return map_floats(lambda leaf: leaf * factor, grads)


def _refuse_options(fun: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Raise where an option is given to the function that was made with it."""
    options = sorted(NamedOptions.__annotations__.keys() & kwargs.keys())
    if not options:
        return
    try:
        inspect.signature(fun).bind_partial(**dict.fromkeys(options))
    except TypeError:
        option, name = options[0], getattr(fun, "__name__", "fun")
        raise TrainingError(
            f"{option} was given to the function that scaled_value_and_grad has made. It belongs "
            f"where that is made: scaled_value_and_grad({name}, {option}={option}). A loss scale "
            "changes from step to step: make the function inside of the step, with the scale that "
            "the step was given, and return the one that the function returns."
        ) from None


def _refuse_nnx(tree: Any) -> None:
    """Raise an error where arguments hold modules or random streams of flax nnx.

    To JAX's ``grad`` they are trees of arrays: it differentiates copies, whose batch statistics
    and keys nobody sees, and takes statistics for parameters.
    """
    nnx = sys.modules.get("flax.nnx")  # whoever has such an object has imported it
    if nnx is None:
        return
    kinds = (nnx.Module, nnx.Rngs)
    for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds)):
        if isinstance(leaf, kinds):
            raise TrainingError(
                f"Changes to {article(type(leaf).__name__)} of flax nnx, such as batch statistics "
                "and random keys, would be lost here. Put amp around a step that takes "
                "nnx.value_and_grad. A loss scale is kept by the optimizer: "
                "nnx.Optimizer(net, jaxamp.training.with_loss_scale(...), wrt=nnx.Param); scale "
                "the loss by optimizer.opt_state.loss_scale.scale(loss)."
            )
