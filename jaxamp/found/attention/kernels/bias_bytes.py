"""Bytes that an attention moves for its scores: by a kernel that reads a bias, and written out.

A kernel has no array of scores, but reads a bias for each; what that is made of is read twice, for
the largest number of each row and for the bias itself. Queries, keys, values and their cotangents
are read and written either way.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxamp.found.attention.kernels.fused import Fused
from jaxamp.found.attention.kernels.spec import Operands, scores_shape

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


def loss(kernel: Fused, operands: Operands, biased: Biased) -> str | None:
    """Return in words what a kernel moves more than is moved without it; ``None`` if it pays."""
    shape = scores_shape(operands.q, operands.k)
    scores = math.prod(shape) or 1
    times = _FORWARD * biased.forward + _BACKWARD * biased.backward + biased.bias_grad
    without = biased.given + 2 * times * scores
    forward, backward = kernel.bias_times
    made = math.prod((*operands.bias.shape[:2], *shape[2:]))
    times = forward * biased.forward + backward * biased.backward
    numbers = made * (1 + 2 * biased.bias_grad) + times * scores
    with_bias = 2 * biased.given + kernel.bias_bytes * numbers
    if with_bias <= without:
        return None
    return (
        f"with its bias the kernel moves {with_bias / scores:.1f} bytes for each score, "
        f"the program as written {without / scores:.1f}"
    )
