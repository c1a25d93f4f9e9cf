"""jmp's policies, made of ours; ``PrecisionPolicy.parse`` reads them."""

from __future__ import annotations

from typing import Any

import jmp

from jaxamp.core.formats import Precision
from jaxamp.policy.policy import PrecisionPolicy


def to_jmp(policy: PrecisionPolicy | str) -> jmp.Policy:
    """Return the jmp policy nearest to a precision policy; rules and guards have no place in it.

    Unnamed parameter and output dtypes are f32, the dtype that such a program had.

    >>> str(to_jmp("mixed_bf16"))
    'p=full,c=bf16,o=full'
    """
    parsed = PrecisionPolicy.parse(policy)
    dtypes = parsed.param_dtype, parsed.base, parsed.output_dtype
    # Scalar types, as jmp has them itself: they are its dictionary's keys.
    scalars: list[Any] = [(precision or Precision.F32).dtype.type for precision in dtypes]
    return jmp.Policy(*scalars)
