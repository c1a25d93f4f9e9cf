"""``quantize`` primitive: ``lowp.quantize`` as one equation, which is not differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from jaxamp.core.define import define, typed_as
from jaxamp.core.formats import CastConfig
from jaxamp.errors import RewriteError
from jaxamp.quantized import lowp
from jaxamp.quantized.lowp import ScaledArray

quantize_p = Primitive("quantize")
quantize_p.multiple_results = True


def quantize(x: Any, cast: CastConfig) -> ScaledArray:
    """Quantize as ``lowp.quantize`` does, in one equation.

    Under vmap the batch is one tensor: where a tensor has one scale, the whole batch shares it.
    """
    return jax.tree.unflatten(_structure(jax.typeof(x), cast), quantize_p.bind(x, cast=cast))


@lru_cache(maxsize=1024)
def _structure(aval: Any, cast: CastConfig) -> Any:
    return jax.tree.structure(jax.eval_shape(partial(lowp.quantize, cast=cast), aval))


def refuse_derivative(*_: Any, **__: Any) -> Any:
    """Refuse to differentiate what is rounded already."""
    raise RewriteError(
        "The backward pass of a scaled dot rounds what it reads, and rounding has no derivative: "
        "such a dot is differentiated once. For higher derivatives keep backward products in bf16: "
        "policy.replace(scaling={'backward': False}).",
        primitive="quantize",
    )


def _batch_quantize(
    operands: Sequence[Any], axes: Sequence[Any], *, cast: CastConfig
) -> tuple[Sequence[Any], Sequence[Any]]:
    leaves = quantize_p.bind(jnp.moveaxis(operands[0], axes[0], 0), cast=cast)
    return leaves, [0 if leaf.ndim else None for leaf in leaves]


def _leaves(x: Any, *, cast: CastConfig) -> Sequence[Any]:
    return jax.tree.leaves(lowp.quantize(x, cast))


define(quantize_p, _leaves, typed_as(_leaves), _batch_quantize, refuse_derivative)
