"""Read a large matrix for some words at a time, so that no copy in 16 bits of all is in memory.

Such a copy is as large as the logits of as many tokens as a token has numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jaxamp.core import jax_compat


def in_slices(eqn: JaxprEqn, operands: Sequence[Any], side: int, words: int, count: int) -> Any:
    """Return the result of a product that reads a matrix for some words at a time.

    The matrix, of two axes, is the operand of that `side`, and `words` its axis of words, which the
    number of slices divides.
    """
    shape, axes = eqn.outvars[0].aval.shape, {side: words}  # type: ignore[attr-defined]
    size = operands[side].shape[words] // count
    contracted = eqn.params["dimension_numbers"][0]
    if is_summed := contracted[side] == (words,):
        axes[1 - side] = contracted[1 - side][0]

    def part(start: Any) -> Any:
        cut = {i: lax.dynamic_slice_in_dim(operands[i], start, size, a) for i, a in axes.items()}
        return jax_compat.bind(eqn, [cut.get(i, array) for i, array in enumerate(operands)])[0]

    starts = size * jnp.arange(count, dtype=jnp.int32)
    if is_summed:
        nothing = lax.full_like(operands[1 - side], 0, shape=shape)
        return lax.scan(lambda total, start: (total + part(start), None), nothing, starts)[0]
    return jnp.moveaxis(lax.map(part, starts), 0, side * (len(shape) - 1)).reshape(shape)
