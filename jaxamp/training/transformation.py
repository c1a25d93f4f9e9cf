"""Parts that the optimizers here share: optax's protocol, parameters narrower than float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxamp.core.keep_precision import keep_precision
from jaxamp.errors import TrainingError
from jaxamp.training.trees import is_float, widen

if TYPE_CHECKING:
    import optax


def transformation(
    init: Callable[..., Any], update: Callable[..., Any]
) -> optax.GradientTransformationExtraArgs:
    """Return a gradient transformation that computes in float32 also inside ``amp``."""
    import optax  # here, so that whoever does not use it need not wait for it

    return optax.GradientTransformationExtraArgs(init, keep_precision("f32")(update))


def as_transformation(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Convert any optimizer of optax, ``MultiSteps`` included, to one with extra arguments.

    Raises:
      TrainingError: it is not an optimizer.
    """
    import optax

    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TrainingError(
            f"{optimizer!r} is not an optimizer. Give a gradient transformation of optax: "
            "optax.adam(1e-3)."
        )
    return optax.with_extra_args_support(optimizer)


def needs_params(params: Any, name: str) -> Any:
    """Return `params`, which must have been given.

    Raises:
      TrainingError: they were not.
    """
    if params is None:
        raise TrainingError(
            f"{name} rounds the parameters, so its update needs them: "
            "optimizer.update(grads, state, params)."
        )
    return params


def is_low(leaf: Any) -> bool:
    """Return whether a floating leaf is narrower than float32.

    >>> is_low(jnp.ones(2, jnp.bfloat16)), is_low(jnp.ones(2))
    (True, False)
    """
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
    info = jnp.finfo(dtype)
    if info.nexp == jnp.finfo(jnp.float32).nexp:
        return jax.lax.reduce_precision(value, info.nexp, info.nmant)
    # reduce_precision has no subnormal numbers; those of float16 are worth keeping.
    return jax.lax.optimization_barrier(value.astype(dtype)).astype(jnp.float32)


def step_to(target: jax.Array, param: Any) -> jax.Array:
    """Return the update that takes `param` to `target`, in float32.

    Added to `param` and rounded it gives `target` bit by bit, unless `param` becomes smaller by a
    factor of more than 2¹⁵ at once.
    """
    return target - widen(param)


def map_params(fn: Callable[..., Any], params: Any, *trees: Any) -> Any:
    """Apply `fn` to every floating parameter and what the trees have for it, in float32 only.

    Parameters that are not floats give what the first tree has for them.
    """
    return jax.tree.map(lambda p, *rest: fn(p, *rest) if is_float(p) else rest[0], params, *trees)
