"""Finite or not: of a whole tree, as a flag on the device; and which leaf is not, by name."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp.errors import TrainingError
from jaxamp.training.trees import is_array, is_float

_T = TypeVar("_T")


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
