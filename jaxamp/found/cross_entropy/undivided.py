"""``undivided`` primitive: an array of which devices have parts along one axis alone.

A loop over chunks reads the matrix of the logits in each, and adds to its gradient. Where devices
have parts of a word's numbers, as under FSDP, XLA would gather the matrix in each chunk, and divide
the sum over devices of its gradient: it moves neither out of a loop, as it does with a sum that
stays whole. So the matrix is gathered before the loop, and the gradient is divided behind it. Words
stay divided.

How arrays lie is not known when a program is traced. This is a sharding constraint where it is
lowered for several devices; on one, and inside a ``shard_map``, it is nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxamp.core.define import define
from jaxamp.core.taxonomy import OpKind, Trait
from jaxamp.kernels.jax_compat.kernel_lowering import undivided_but

undivided_p = Primitive("undivided")


def undivided(array: Any, size: int) -> Any:
    """Return an array of which devices have parts along axes of a size alone; others as they are.

    >>> import jax.numpy as jnp
    >>> undivided(jnp.ones((2, 4)), size=4).shape
    (2, 4)
    """
    free = tuple(n == size for n in array.shape)
    if not any(free) or all(free):
        return array  # no matrix of words
    return undivided_p.bind(array, free=free)


def _batch(args: Sequence[Any], dims: Sequence[Any], *, free: tuple[bool, ...]) -> Any:
    (array,), (dim,) = args, dims
    return undivided_p.bind(array, free=(*free[:dim], True, *free[dim:])), dim


define(
    undivided_p,
    lambda array, free: array,
    lambda aval, free: aval,
    _batch,
    lowered={},
    kind=OpKind.DATA_MOVEMENT,
    trait=Trait.COLLECTIVE,  # it is sent in the format that products read
)
mlir.register_lowering(
    undivided_p, lambda context, value, free: [undivided_but(context, value, free)]
)
ad.deflinear2(undivided_p, lambda cotangent, _, free: [undivided_p.bind(cotangent, free=free)])
