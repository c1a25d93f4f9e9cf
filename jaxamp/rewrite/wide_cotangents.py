"""Sum the cotangents of a narrow value in float32.

JAX adds up the cotangents of a value's readers in the value's own dtype, and so does the transpose
of a loop for what is the same in every iteration. In bfloat16 such a sum is rounded at each step,
and stagnates once a step adds less than 1/256 of it.

See: https://github.com/jax-ml/jax/issues/18931 for dtypes of cotangents; Higham, "The accuracy of
floating point summation", SIAM J. Sci. Comput. 14, 1993.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxamp.core import jax_compat


@jax.custom_jvp
def differentiated_as(narrow: Any, wide: Any) -> Any:
    """Return `narrow`; its tangent is that of `wide`.

    Args:
      narrow: bf16[...], say: the value as it is stored.
      wide: f32[...]: the same value; it is not read, so that compilers drop it.
    """
    return narrow


@differentiated_as.defjvp
def _jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    narrow, _ = primals
    return narrow, jax_compat.convert(tangents[1], narrow.dtype)
