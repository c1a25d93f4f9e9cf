"""jmp's policies, their string grammar, and loss scales: to and from ours."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import jmp

from jaxamp.core.formats import Precision
from jaxamp.errors import TrainingError
from jaxamp.policy.jmp_string import ThreeDtypes, parse_grammar
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.training.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale


def from_jmp(policy: jmp.Policy | str) -> PrecisionPolicy:
    """Return the precision policy that a jmp policy or its string describes.

    A string means what it means to jmp: ``"bf16"`` is bfloat16 parameters and results, too, where
    ``PrecisionPolicy.parse("bf16")`` leaves those alone.

    The compute dtype becomes the ``MIXED_F16`` preset of that dtype, guards and f32 accumulation
    included; the parameter and output dtypes are carried along.

    Raises:
      PolicyError: a part or dtype is not understood.

    >>> from_jmp(jmp.get_policy("c=f16,o=f32")) == from_jmp("params=f32,compute=f16,output=f32")
    True
    """
    if isinstance(policy, str):
        return PrecisionPolicy.of_dtypes(*parse_grammar(policy))
    return PrecisionPolicy.parse(policy)


def to_jmp(policy: PrecisionPolicy | str) -> jmp.Policy:
    """Return the jmp policy nearest to a precision policy; rules and guards have no place in it.

    Unnamed parameter and output dtypes are f32, the dtype that such a program had.

    >>> str(to_jmp("mixed_bf16"))
    'p=full,c=bf16,o=full'
    """
    # Scalar types, as jmp has them itself: they are its dictionary's keys.
    scalars: list[Any] = [precision.dtype.type for precision in _three_dtypes(policy)]
    return jmp.Policy(*scalars)


def to_grammar(policy: PrecisionPolicy | jmp.Policy | str) -> str:
    """Return the policy in jmp's string grammar; as lossy as ``to_jmp``.

    >>> to_grammar("mixed_f16")
    'p=f32,c=f16,o=f32'
    """
    return str(_three_dtypes(policy))


def _three_dtypes(policy: PrecisionPolicy | jmp.Policy | str) -> ThreeDtypes:
    parsed = PrecisionPolicy.parse(policy)
    return ThreeDtypes(
        parsed.param_dtype or Precision.F32,
        parsed.base,
        parsed.output_dtype or Precision.F32,
    )


def loss_scale_from_jmp(scale: Any) -> Any:
    """Convert a jmp loss scale, its floor included.

    Convert before ``jit``: jmp's own object comes out of every compiled function with its floor
    back at 1.

    Raises:
      TrainingError: it is not a loss scale of jmp's.

    >>> float(loss_scale_from_jmp(jmp.DynamicLossScale(2.0**15)).loss_scale)
    32768.0
    """
    if isinstance(scale, jmp.DynamicLossScale):
        return DynamicLossScale(
            scale.loss_scale, scale.counter, scale.period, scale.factor, scale.min_loss_scale
        )
    if isinstance(scale, jmp.StaticLossScale):
        return StaticLossScale(scale.loss_scale)
    if isinstance(scale, jmp.NoOpLossScale):
        return NoOpLossScale()
    raise TrainingError(f"{scale!r} is not a loss scale of jmp's.")


def loss_scale_to_jmp(scale: Any) -> Any:
    """Return the jmp loss scale nearest to ours; a ceiling and a backoff have no place there.

    Raises:
      TrainingError: it is not a loss scale of ours.

    >>> loss_scale_to_jmp(NoOpLossScale())
    NoOpLossScale()
    """
    if isinstance(scale, DynamicLossScale):
        floor = jnp.asarray(scale.min_loss_scale)
        numbers: tuple[Any, ...] = (scale.counter, scale.period, scale.factor, floor)
        return jmp.DynamicLossScale(jnp.asarray(scale.loss_scale), *numbers)
    if isinstance(scale, StaticLossScale):
        return jmp.StaticLossScale(scale.loss_scale)
    if isinstance(scale, NoOpLossScale):
        return jmp.NoOpLossScale()
    raise TrainingError(f"{scale!r} is not a loss scale of jaxamp's.")
