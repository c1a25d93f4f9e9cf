"""From a call to a program that another process can compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxamp.calls import is_array
from jaxamp.errors import InspectionError


def flattened(
    fn: Any, wrap: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., list[Any]], list[jax.ShapeDtypeStruct]]:
    """A call as a function of its arrays alone, and their types; anything else is built in."""
    leaves, treedef = jax.tree.flatten((fn, args, kwargs))
    traced = [index for index, leaf in enumerate(leaves) if _is_input(leaf)]

    def flat(*arrays: Any) -> list[Any]:
        values = [*leaves]
        for index, array in zip(traced, arrays, strict=True):
            values[index] = array
        function, positional, named = jax.tree.unflatten(treedef, values)
        return _arrays(wrap(function)(*positional, **named))

    return flat, [jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in traced]


def exported(
    fn: Any,
    wrap: Callable[[Any], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    platform: str,
) -> bytes:
    """A call for a platform, serialized: arrays are its inputs, anything else is built in.

    Args:
      fn: the function; the arrays of a module are inputs too.
      wrap: what is done to the function, such as giving it a policy.
      args: arguments, in which ``jax.ShapeDtypeStruct`` may stand for an array.
      kwargs: keyword arguments.
      platform: what JAX calls the kind of device.

    Raises:
      InspectionError: what JAX needs to serialize programs is not installed.
    """
    flat, specs = flattened(fn, wrap, args, kwargs)
    try:
        made = jax.export.export(jax.jit(flat), platforms=[platform])(*specs)
        return bytes(made.serialize())
    except ModuleNotFoundError as error:
        raise InspectionError(
            f"JAX needs {error.name} to hand a program to another compiler: "
            f"pip install {error.name}"
        ) from None


def _is_input(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or is_array(leaf)


def _arrays(results: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(results) if is_array(leaf)]
