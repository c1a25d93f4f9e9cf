"""jmp's policies and their string grammar: to and from ours."""

from __future__ import annotations

from typing import Any

import jmp

from jaxamp.core.formats import Precision
from jaxamp.policy.jmp_string import ThreeDtypes, parse_grammar
from jaxamp.policy.policy import PrecisionPolicy


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
