"""Read a large matrix for some words at a time, so that no copy in 16 bits of all is in memory.

Such a copy is as large as the logits of as many tokens as a token has numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.jaxprs.interpret import evaluate


def in_slices(body: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return the same function of arrays, whose products read a matrix in slices of words.

    Args:
      body: the function; the larger operand of the first of its products is the matrix.
      count: how many slices there are; it divides the words.
    """
    if count == 1:
        return body

    def each(*given: Any) -> Any:
        closed, shapes = jax.make_jaxpr(body, return_shape=True)(*given)
        first = next(e for e in closed.jaxpr.eqns if e.primitive.name == "dot_general")
        matrix: Any = max(first.invars, key=lambda v: v.aval.size)  # type: ignore[attr-defined]
        contracted = first.params["dimension_numbers"][0][first.invars.index(matrix)]

        def emit(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
            if eqn.primitive is first.primitive and matrix in eqn.invars:
                return [_product(eqn, operands, eqn.invars.index(matrix), 1 - contracted[0], count)]
            return jax_compat.bind(eqn, operands)

        results = evaluate(closed, jax.tree.leaves(given), emit)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return each


def _product(eqn: JaxprEqn, operands: Sequence[Any], side: int, words: int, count: int) -> Any:
    """Return the result of a product whose operand of a side is cut along one of its two axes."""
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
