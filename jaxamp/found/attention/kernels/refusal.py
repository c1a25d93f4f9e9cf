"""Reasons for which no platform's fused kernel takes an attention, known before lowering."""

from __future__ import annotations

from collections.abc import Sequence

from jaxamp.found.attention.kernels.bias_bytes import Biased, loss
from jaxamp.found.attention.kernels.fused import Fused, flattened
from jaxamp.found.attention.kernels.platforms import everywhere
from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands, mismatch
from jaxamp.found.attention.kernels.ways import ways


def refusal(
    operands: Operands,
    spec: AttentionSpec,
    kernels: Sequence[Fused] | None = None,
    biased: Biased | None = None,
) -> str | None:
    """Return in words why no kernel takes operands both ways, or pays; ``None`` if one does.

    Args:
      operands: arrays or avals.
      spec: the static parameters.
      kernels: those that are asked; ``None`` for those of all platforms.
      biased: what is computed, for the bytes of the bias to be counted; ``None`` for no count.

    >>> import jax
    >>> x = jax.ShapeDtypeStruct((1, 64, 4, 300), "bfloat16")
    >>> refusal(Operands(x, x, x), AttentionSpec(scale=1.0))
    'cuDNN: The head dim must be <= 256 and a multiple of 8, but got 300.'
    """
    if unlike := mismatch(operands, spec):
        return unlike
    flat = flattened(operands)
    reasons = []
    for kernel in everywhere() if kernels is None else kernels:
        reason: str | None = None
        for way in ways(kernel, spec):
            reason = _reason(way, flat, spec, biased)
            if reason is None:
                return None
        reasons.append(f"{kernel.name}: {reason}")
    return reasons[0] if reasons else "there is no kernel"


def _reason(
    kernel: Fused, operands: Operands, spec: AttentionSpec, biased: Biased | None
) -> str | None:
    """Return why a kernel does not take operands with one batch axis both ways, or does not pay."""
    passes = (kernel.obstacle(operands, spec, backward) for backward in (False, True))
    reason = next(filter(None, passes), None)
    read = kernel.as_read(operands)
    if reason is None and biased is not None and read.bias is not None:
        return loss(kernel, read, biased)
    return reason
