"""Micro-batches: a batch taken in parts, one after the other, and averaged in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxamp.errors import TrainingError
from jaxamp.regions import keep_precision
from jaxamp.training.trees import is_array, is_float, leaf_name, widen


def averaged(
    raw: Callable[..., tuple[Any, Any]],
    parts: int,
    batch_argnums: int | Sequence[int],
    has_aux: bool,
) -> Callable[..., tuple[Any, Any]]:
    """`raw`, which gives value and gradients, over the parts of a batch, by ``scan``.

    Args:
      raw: gives ``(loss, grads)``, or ``((loss, aux), grads)``.
      parts: how many micro-batches.
      batch_argnums: which positional arguments have a leading axis of examples.
      has_aux: whether the value has an aux.

    Returns:
      A function of `raw`'s arguments that gives the mean loss, the stacked aux and the mean
      gradients, which were summed in float32.
    """
    if parts < 1:
        raise TrainingError(f"A batch has 1 or more micro-batches, not {parts!r}.")
    argnums = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)

    def over_parts(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        batches = [split(_argument(args, i), parts, f"argument {i}") for i in argnums]

        def of_part(part: list[Any]) -> tuple[Any, Any]:
            given = dict(zip(argnums, part, strict=True))
            return raw(*(given.get(i, arg) for i, arg in enumerate(args)), **kwargs)

        return _scan_mean(of_part, batches, parts, has_aux)

    return over_parts


def split(batch: Any, parts: int, name: str = "the batch") -> Any:
    """Every array of `batch` in `parts` parts: part i has the examples i, i + parts, and so on.

    Examples that are next to each other go to different parts, so that an axis of examples that is
    divided over devices is divided over the same devices in every part.

    Args:
      batch: a tree of arrays with a leading axis of examples.
      parts: how many parts.
      name: what messages call it.

    Raises:
      TrainingError: an array has no such axis, or its length is no multiple of `parts`.

    >>> split(jnp.arange(6), 2).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    leaves, treedef = jax.tree.flatten(batch)

    def part(index: int, leaf: Any) -> jax.Array:
        if not is_array(leaf) or leaf.ndim == 0 or leaf.shape[0] % parts:
            raise TrainingError(
                f"{name}{leaf_name(batch, index)} of {_shape(leaf)} does not split into {parts} "
                "micro-batches: its first axis is to hold a multiple of as many examples. "
                "batch_argnums says which arguments hold examples."
            )
        array = jnp.asarray(leaf)
        folded = array.reshape(array.shape[0] // parts, parts, *array.shape[1:])
        return jnp.swapaxes(folded, 0, 1)

    return jax.tree.unflatten(treedef, [part(i, leaf) for i, leaf in enumerate(leaves)])


def _scan_mean(of_part: Callable[..., Any], batches: Any, parts: int, has_aux: bool) -> Any:
    first = jax.tree.map(lambda leaf: leaf[0], batches)
    _, shapes = jax.eval_shape(of_part, first)
    zeros = jax.tree.map(_zero, shapes)

    def body(total: Any, part: Any) -> Any:
        value, grads = of_part(part)
        with keep_precision("f32"):
            return jax.tree.map(lambda t, g: t + widen(g), total, grads), value

    total, values = jax.lax.scan(body, zeros, batches)
    with keep_precision("f32"):
        grads = jax.tree.map(lambda t: t / parts, total)
        if has_aux:
            return (_mean(values[0]), values[1]), grads
        return _mean(values), grads


def _zero(shape: Any) -> jax.Array:
    if not is_float(shape):
        raise TrainingError("Gradients of integers cannot be averaged over micro-batches.")
    return jnp.zeros(shape.shape, jnp.promote_types(shape.dtype, jnp.float32))


def _mean(losses: Any) -> Any:
    return jax.tree.map(lambda loss: widen(loss).mean(axis=0), losses)


def _argument(args: Sequence[Any], index: int) -> Any:
    try:
        return args[index]
    except IndexError:
        raise TrainingError(
            f"batch_argnums names the positional argument {index}, and {len(args)} were given. "
            "Pass what is split over micro-batches by position."
        ) from None


def _shape(leaf: Any) -> str:
    return f"shape {list(leaf.shape)}" if is_array(leaf) else f"type {type(leaf).__name__}"
