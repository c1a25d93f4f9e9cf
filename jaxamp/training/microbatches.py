"""Micro-batches: a batch taken in parts, one after the other, and averaged in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxamp.core.keep_precision import keep_precision
from jaxamp.errors import JaxAmpError, TrainingError
from jaxamp.training.trees import is_array, is_float, leaf_name, widen


def averaged(
    raw: Callable[..., tuple[Any, Any]],
    parts: int,
    batch_argnums: int | Sequence[int],
    has_aux: bool,
    argnums: int | Sequence[int] = 0,
) -> Callable[..., tuple[Any, Any]]:
    """Average `raw`, which returns value and gradients, over micro-batches in a ``scan``.

    Args:
      raw: gives ``(loss, grads)``, or ``((loss, aux), grads)``.
      parts: how many micro-batches.
      batch_argnums: which positional arguments have a leading axis of examples.
      has_aux: whether the value has an aux.
      argnums: which positional arguments are differentiated.

    Returns:
      A function of `raw`'s arguments that gives the mean loss, the stacked aux and the mean
      gradients, which were summed in float32.

    Raises:
      TrainingError: the batch does not split; or `raw` fails on a part of it, and another argument
        may be a part of the batch too.
    """
    if parts < 1:
        raise TrainingError(f"A batch has 1 or more micro-batches, not {parts!r}.")

    def over_parts(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        numbers = _positions(batch_argnums, args)
        batches = {i: split(args[i], parts, f"argument {i}") for i in numbers}

        def of_part(part: dict[int, Any]) -> tuple[Any, Any]:
            return raw(*(part.get(i, arg) for i, arg in enumerate(args)), **kwargs)

        try:
            return _scan_mean(of_part, batches, parts, has_aux)
        except (TypeError, ValueError) as error:
            whole = _unsplit(args, numbers, argnums)
            if isinstance(error, JaxAmpError) or not whole:
                raise
            raise TrainingError(
                f"The function fails on a micro-batch: {error} Only {_named(numbers)} was split, "
                f"and {_named(whole)} may hold examples too: "
                f"batch_argnums={tuple(sorted([*numbers, *whole]))}?"
            ) from error

    return over_parts


def split(batch: Any, parts: int, name: str = "the batch") -> Any:
    """Split every array of `batch`: part i has the examples i, i + parts, and so on.

    Examples that are next to each other go to different parts, so that an axis of examples that is
    divided over devices is divided over the same devices in every part.

    Args:
      batch: a tree of arrays with a leading axis of examples.
      parts: how many parts.
      name: what messages call it.

    Raises:
      TrainingError: an array has no such axis, or its length is not a multiple of `parts`.

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


def _tuple(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def _positions(batch_argnums: int | Sequence[int], args: Sequence[Any]) -> list[int]:
    """Return the arguments to split; as everywhere, -1 is the last."""
    for number in _tuple(batch_argnums):
        if not -len(args) <= number < len(args):
            raise TrainingError(
                f"batch_argnums names the positional argument {number}, and {len(args)} were "
                "given. Pass what is split over micro-batches by position."
            )
    return [number % len(args) for number in _tuple(batch_argnums)]


def _unsplit(
    args: Sequence[Any], numbers: Sequence[int], argnums: int | Sequence[int]
) -> list[int]:
    """Return the arguments that are as long as the batch, and neither split nor differentiated."""
    known = {i % len(args) for i in (*numbers, *_tuple(argnums))}
    examples = {leaf.shape[0] for i in numbers for leaf in _arrays(args[i])}
    return [i for i in range(len(args)) if i not in known and _holds(args[i], examples)]


def _holds(arg: Any, examples: set[int]) -> bool:
    """Return whether the first axis of all arrays has one of these lengths."""
    lengths = [leaf.shape[0] if leaf.shape else None for leaf in _arrays(arg)]
    return bool(lengths) and examples.issuperset(lengths)


def _arrays(arg: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(arg) if is_array(leaf)]


def _named(numbers: Sequence[int]) -> str:
    return " and ".join(f"argument {number}" for number in numbers)


def _shape(leaf: Any) -> str:
    return f"shape {list(leaf.shape)}" if is_array(leaf) else f"type {type(leaf).__name__}"
