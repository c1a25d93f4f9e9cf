"""Floating leaves of a tree: widened, measured, and finite or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp.errors import TrainingError

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


def all_finite(tree: Any, *, axis_name: Any = None) -> jax.Array:
    """Return whether no floating leaf holds an infinity or a NaN.

    Args:
      tree: any tree; leaves that are not floats are finite.
      axis_name: mapped axes (of ``shard_map``, ``pmap`` or ``vmap``) whose shards must agree: all
        get `False` where one has found something. Not needed under ``jit``, sharded or not.

    Returns:
      A boolean scalar, on the device: nothing waits for it.

    >>> bool(all_finite({"w": jnp.ones(3), "steps": 1}))
    True
    >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf])}))
    False
    """
    flags = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree) if is_float(leaf)]
    finite = jnp.stack(flags).all() if flags else jnp.array(True)
    if axis_name is None:
        return finite
    return jax.lax.pmin(finite.astype(jnp.int32), axis_name).astype(bool)


def nonfinite_index(tree: Any) -> jax.Array:
    """Return the position, among all leaves, of the first that is not finite; -1 for none.

    Returned from a compiled step it costs nothing; ``first_nonfinite`` turns it into a name.

    Args:
      tree: any tree; leaves that are no floats are finite.

    Returns:
      An i32 scalar, on the device: nothing waits for it.

    >>> int(nonfinite_index({"a": jnp.ones(2), "b": jnp.array(jnp.nan)}))
    1
    """
    flags = [
        jnp.isfinite(leaf).all() if is_float(leaf) else jnp.array(True)
        for leaf in jax.tree.leaves(tree)
    ]
    if not flags:
        return jnp.int32(-1)
    bad = ~jnp.stack(flags)
    return jnp.where(bad.any(), jnp.argmax(bad), -1).astype(jnp.int32)


def first_nonfinite(tree: Any, index: Any = None) -> str | None:
    """Return the name of the first leaf that is not finite, ``None`` where all are.

    This waits for the device, so ask only when the flag is `False`.

    Args:
      tree: gradients or parameters; with `index`, any tree of the same structure.
      index: what ``nonfinite_index`` gave in a compiled step.

    Returns:
      The path to the leaf as ``jax.tree_util.keystr`` writes it, or ``None``.

    Raises:
      TrainingError: the values are not known yet, because a trace is under way.

    >>> first_nonfinite({"layers": [{"w": jnp.ones(2)}, {"w": jnp.array([1.0, jnp.nan])}]})
    "['layers'][1]['w']"
    """
    if index is None:
        index = nonfinite_index(tree)
    try:
        position = int(index)
    except jax.errors.ConcretizationTypeError:
        raise TrainingError(
            "first_nonfinite needs values, and inside jit there are none yet. Return "
            "nonfinite_index(grads) from the step and name it outside: "
            "first_nonfinite(params, index)."
        ) from None
    if position < 0:
        return None
    path, _ = jax.tree_util.tree_flatten_with_path(tree)[0][position]
    return jax.tree_util.keystr(path)


def select_tree(pred: Any, on_true: _T, on_false: _T) -> _T:
    """Select `on_true` where the flag is true, else `on_false`, leaf by leaf and bit by bit.

    Unlike jmp's it takes trees whose leaves are not all arrays, such as modules: those leaves are
    taken from `on_true`.

    Args:
      pred: a boolean scalar.
      on_true: a tree.
      on_false: a tree of the same structure, shapes and dtypes.

    Returns:
      A tree of the same structure. Both trees are computed; the flag only selects, on the device.

    Raises:
      TrainingError: `pred` is not a boolean scalar.

    >>> select_tree(jnp.bool_(False), {"w": np.float32(1)}, {"w": np.float32(2)})["w"].item()
    2.0
    """
    flag = as_flag(pred)

    def select(a: Any, b: Any) -> Any:
        if not is_array(a) and not isinstance(a, (bool, int, float, complex)):
            return a
        return jnp.where(flag, a, b)

    return jax.tree.map(select, on_true, on_false)


def as_flag(value: Any) -> jax.Array:
    """Convert `value` to a boolean scalar array."""
    flag = jnp.asarray(value)
    if flag.shape != () or flag.dtype != np.bool_:
        raise TrainingError(
            f"A boolean scalar is needed here, not {flag.dtype}{list(flag.shape)}. "
            "jaxamp.training.all_finite(grads) gives one for a whole tree."
        )
    return flag
