"""Sum the cotangents of a narrow loop invariant in float32.

The transpose of a loop carries the cotangent of an invariant through the iterations, in the
invariant's own dtype, as JAX requires. In bfloat16 that sum stagnates once an iteration adds less
than 1/256 of it.

See: https://github.com/jax-ml/jax/issues/18931 for dtypes of cotangents; Higham, "The accuracy of
floating point summation", SIAM J. Sci. Comput. 14, 1993.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


@jax.custom_jvp
def loop_invariant(narrow: Any, wide: Any) -> Any:
    """Return `narrow`; its tangent is that of `wide`.

    Args:
      narrow: bf16[...], say: the value as it is stored.
      wide: f32[...]: the same value; it is not read, so that compilers drop it.
    """
    return narrow


@loop_invariant.defjvp
def _jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    narrow, _ = primals
    return narrow, lax.convert_element_type(tangents[1], narrow.dtype)
