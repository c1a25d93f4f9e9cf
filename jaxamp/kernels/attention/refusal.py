"""Reasons for which no platform's fused kernel takes an attention, known before lowering."""

from __future__ import annotations

from typing import Any

from jaxamp.errors import KernelError
from jaxamp.kernels.attention.fused import flattened
from jaxamp.kernels.attention.platforms import everywhere
from jaxamp.kernels.attention.spec import AttentionSpec, check_operands


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
    'cuDNN: The head dim must be <= 256 and a multiple of 8, but got 300.'
    """
    try:
        check_operands(q, k, v, bias, spec)
    except KernelError as error:
        return str(error)
    flat = flattened(q, k, v, bias)
    found = [(kernel.name, kernel.obstacle(*flat, spec, False)) for kernel in everywhere()]
    if any(reason is None for _, reason in found):
        return None
    name, reason = found[0]
    return f"{name}: {reason}"
