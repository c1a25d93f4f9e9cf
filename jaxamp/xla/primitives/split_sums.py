"""Split sums over the middle axes of an array, in programs for one GPU.

The statistics of a norm of each image or channel group are such sums, and so are gradients of what
one time embedding adds to, or multiplies in, all positions. One block of threads adds up a number
of the result. With less than some thousand terms XLA:GPU neither splits such a sum itself nor fuses
it with the arithmetic before it, which would then have few threads: the terms are written to memory
in float32, and read again. Added up in parts first, and the parts behind a barrier, they are not.

A group is changed when its equation is lowered, in forward and backward passes alike.

See: ``python -m benchmarks.deviceless --target h200 --model unet``, JAX 0.10.2: a U-Net with group
norms moves 0.83 and 0.84 of the bytes that it moves without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.jaxprs.interpret import Instead, emitted

_TERMS, _PARTS = 256, 32
"""Terms of one part, and parts of a sum, at most.

XLA:GPU fuses sums of up to 256 terms that lie apart, and from some thousand on it splits them
itself (H200, JAX 0.10.2). Parts are arrays in memory: the fewer, the better.
"""
LARGE = 2**18  # fewer elements stay in the GPU's second-level cache: a kernel would cost more


@jax_compat.kept_with
def split_sums(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program that adds up the middle axes of its arrays in parts.

    >>> import jax
    >>> image = jax.ShapeDtypeStruct((8, 32, 32, 64), "float32")
    >>> mean = jax.make_jaxpr(lambda x: x.sum((1, 2)))(image)
    >>> [eqn.primitive.name for eqn in split_sums(mean).jaxpr.eqns]
    ['reshape', 'reduce_sum', 'optimization_barrier', 'reduce_sum']
    """
    return emitted(closed, _find)


def _find(eqn: JaxprEqn) -> Instead | None:
    parts = _parts(eqn)
    return partial(_summed, eqn, parts) if parts > 1 else None


def _summed(eqn: JaxprEqn, parts: int, operands: Sequence[Any]) -> list[Any]:
    (x,), axes = operands, sorted(eqn.params["axes"])
    first = axes[0]
    apart = lax.reshape(
        x, (*x.shape[:first], parts, x.shape[first] // parts, *x.shape[first + 1 :])
    )
    run = _run(axes)
    summed = lax.optimization_barrier(lax.reduce_sum(apart, [axis + 1 for axis in run]))
    others = [axis - len(run) + 1 for axis in axes[len(run) :]]
    return [lax.reduce_sum(summed, [first, *others])]


def _parts(eqn: JaxprEqn) -> int:
    """Return in how many parts an equation's sum is to be added up; one for what is no such sum."""
    aval: Any = eqn.invars[0].aval if eqn.invars else None
    if eqn.primitive is not lax.reduce_sum_p or aval.dtype != jnp.float32:
        return 1
    shape, axes = aval.shape, sorted(eqn.params["axes"])
    kept = [size for axis, size in enumerate(shape) if axis not in axes]
    if len(kept) < 2 or not all(isinstance(size, int) for size in shape):
        return 1
    before, last = math.prod(shape[: axes[0]]), len(shape) - 1
    if before == 1 or axes == [last] or math.prod(shape) < LARGE:
        return 1
    terms = math.prod(shape[axis] for axis in _run(axes))
    found = (n for n in range(-(-terms // _TERMS), _PARTS + 1) if shape[axes[0]] % n == 0)
    return next(found, 1)


def _run(axes: Sequence[int]) -> list[int]:
    """Return those of sorted axes that lie side by side from the first on."""
    return [axis for place, axis in enumerate(axes) if axis == axes[0] + place]
