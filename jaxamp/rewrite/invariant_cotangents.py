"""What is the same in every turn of a loop: read narrow, its cotangents added up in float32.

The transpose of a loop carries the cotangent of such a value from turn to turn, in the value's own
format. In bfloat16 that sum stops growing once a turn adds less than 1/256 of it.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


@jax.custom_jvp
def same_each_turn(narrow: Any, wide: Any) -> Any:
    """What `narrow` is, differentiated by `wide`.

    Args:
      narrow: a value as it is stored.
      wide: the same value in f32; it is not read, so that compilers drop it.
    """
    return narrow


@same_each_turn.defjvp
def _jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    narrow, _ = primals
    return narrow, lax.convert_element_type(tangents[1], narrow.dtype)
