"""Floating leaves of a tree: widened, measured, kept apart from everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

_T = TypeVar("_T")


def is_array(leaf: Any) -> bool:
    """Return whether `leaf` is an array, concrete, traced or abstract."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def is_float(leaf: Any) -> bool:
    """Return whether `leaf` is a floating or complex number or array of them.

    >>> import numpy as np
    >>> is_float(1.0), is_float(np.int32(1)), is_float("relu"), is_float(jax.random.key(0))
    (True, False, False, False)
    """
    if is_array(leaf):
        return jnp.issubdtype(leaf.dtype, jnp.inexact)
    return isinstance(leaf, (float, complex))


def widen(leaf: Any) -> jax.Array:
    """Cast `leaf` to float32, or leave it in its own dtype where that is wider."""
    array = jnp.asarray(leaf)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def map_floats(fn: Callable[..., Any], tree: _T, *others: Any) -> _T:
    """Apply `fn` to the floating leaves of `tree`; the other leaves stay as they are.

    >>> map_floats(lambda x: 2 * x, {"w": 1.5, "steps": 3, "name": "relu"})
    {'name': 'relu', 'steps': 3, 'w': 3.0}
    """
    return jax.tree.map(lambda leaf, *o: fn(leaf, *o) if is_float(leaf) else leaf, tree, *others)


def widen_floats(tree: _T) -> _T:
    """Return every floating leaf in float32 at least.

    >>> widen_floats({"w": jnp.ones(2, jnp.bfloat16)})["w"].dtype
    dtype('float32')
    """
    return map_floats(widen, tree)


def global_norm(tree: Any, axis_name: Any = None) -> jax.Array:
    """Return the norm f32[] of all floating leaves; those split over mapped axes are whole there.

    >>> import numpy as np
    >>> float(global_norm({"a": np.float32(3), "b": np.float32(4), "steps": 7}))
    5.0
    """
    leaves = [widen(leaf) for leaf in jax.tree.leaves(tree) if is_float(leaf)]
    squares = [_total(jnp.sum(jnp.square(jnp.abs(leaf))), axis_name) for leaf in leaves]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def _total(part: jax.Array, axis_name: Any) -> jax.Array:
    """Return the sum over the devices whose parts differ."""
    names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    axes = tuple(name for name in names if name in varies_over(part))
    return jax.lax.psum(part, axes) if axes else part


def varies_over(value: Any) -> frozenset[Any]:
    """Return the mapped axes of ``shard_map`` over which a value may differ, as its type says."""
    return jax.typeof(value).manual_axis_type.varying
