"""Reasons for which no platform's fused kernel takes an attention, or pays, known before lowering.

A kernel has no array of scores, but reads a bias for each, in 16 bits; what that is made of is read
twice, for the largest number of each row and for the bias itself. Written out, an attention moves
its scores. Queries, keys, values and their cotangents are read and written either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxamp.found.attention.kernels.fused import Fused, flattened
from jaxamp.found.attention.kernels.platforms import ways
from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands, scores_shape

_FORWARD, _BACKWARD = 4, 7
"""Times that 16-bit arrays of scores, weights and their cotangents are written or read."""


class Biased(NamedTuple):
    """Use of an attention that has a bias by a program.

    Attributes:
      given: bytes of the arrays that the bias is made of.
      forward: whether the output is computed.
      backward: whether cotangents are.
      bias_grad: whether that of the bias is one of these.
    """

    given: int
    forward: bool = True
    backward: bool = False
    bias_grad: bool = False


def loss(operands: Operands, biased: Biased) -> str | None:
    """Return in words what a kernel moves more than is moved without it; ``None`` if it pays."""
    shape = scores_shape(operands.q, operands.k)
    scores = math.prod(shape) or 1
    times = _FORWARD * biased.forward + _BACKWARD * biased.backward + biased.bias_grad
    without = biased.given + 2 * times * scores
    made = math.prod((*operands.bias.shape[:2], *shape[2:]))
    numbers = made * (1 + 2 * biased.bias_grad) + (biased.forward + biased.backward) * scores
    with_bias = 2 * (biased.given + numbers)
    if with_bias <= without:
        return None
    return (
        f"with its bias the kernel moves {with_bias / scores:.1f} bytes for each score, "
        f"the program as written {without / scores:.1f}"
    )


def refusal(
    operands: Operands, spec: AttentionSpec, kernels: Sequence[Fused], biased: Biased
) -> str | None:
    """Return in words why no kernel takes operands both ways, or pays; ``None`` if one does.

    >>> import jax
    >>> from jaxamp.found.attention.kernels.platforms import everywhere
    >>> x = jax.ShapeDtypeStruct((1, 64, 4, 300), "bfloat16")
    >>> refusal(Operands(x, x, x), AttentionSpec(scale=1.0), everywhere(), Biased(given=0))
    'cuDNN: The head dim must be <= 256 and a multiple of 8, but got 300.'
    """
    flat = flattened(operands)
    reasons = []
    for kernel in kernels:
        reason: str | None = None
        for way in ways(kernel, spec):
            reason = _reason(way, flat, spec, biased)
            if reason is None:
                return None
        reasons.append(f"{kernel.name}: {reason}")
    return reasons[0] if reasons else "there is no kernel"


def _reason(kernel: Fused, operands: Operands, spec: AttentionSpec, biased: Biased) -> str | None:
    """Return why a kernel does not take operands with one batch axis both ways, or does not pay."""
    passes = (kernel.obstacle(operands, spec, backward) for backward in (False, True))
    reason = next(filter(None, passes), None)
    read = kernel.as_read(operands)
    if reason is None and read.bias is not None:
        return loss(read, biased)
    return reason
