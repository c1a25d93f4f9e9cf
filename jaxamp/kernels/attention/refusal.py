"""Why no platform's fused kernel takes an attention, known before anything is lowered."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxamp.errors import KernelError
from jaxamp.kernels.attention.spec import AttentionSpec, check_operands

_NARROW = ("bfloat16", "float16")
_LARGEST_HEAD = 256  # of cuDNN on Hopper, and a multiple of 8


def refusal(q: Any, k: Any, v: Any, bias: Any, spec: AttentionSpec) -> str | None:
    """Return in words why no kernel of any platform takes these operands; ``None`` if one does.

    Args:
      q: array or aval of the queries [*b, T, N, H].
      k: of the keys [*b, S, K, H].
      v: of the values [*b, S, K, V].
      bias: of what is added to the scores, or ``None``.
      spec: the static parameters.

    >>> import jax
    >>> x = jax.ShapeDtypeStruct((1, 64, 4, 300), "bfloat16")
    >>> refusal(x, x, x, None, AttentionSpec(scale=1.0))
    'head size 300: kernels take multiples of 8 up to 256'
    """
    try:
        check_operands(q, k, v, bias, spec)
    except KernelError as error:
        return str(error)
    if jnp.dtype(q.dtype).name not in _NARROW:
        return f"{q.dtype} operands: kernels take {' and '.join(_NARROW)}"
    for size in (q.shape[-1], v.shape[-1]):
        if size % 8 or not 0 < size <= _LARGEST_HEAD:
            return f"head size {size}: kernels take multiples of 8 up to {_LARGEST_HEAD}"
    if q.shape[-1] != v.shape[-1]:
        return f"queries of head size {q.shape[-1]} and values of {v.shape[-1]}"
    queries, keys = q.shape[-3], k.shape[-3]
    if bias is not None and (queries % 2 or keys % 2):
        return f"a bias for {queries} queries and {keys} keys: kernels take even numbers of both"
    if min(queries, keys) < 1 or 0 in q.shape:
        return "nothing to attend to"
    return None
