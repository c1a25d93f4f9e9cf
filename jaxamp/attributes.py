"""Arrays that an object holds as attributes: constants of a trace, which must not go stale."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import jax
import numpy as np

_ARRAYS = (jax.Array, np.ndarray)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_NEITHER = (str, bytes, int, float, complex, type(None), type, FunctionType)  # nor holds any


def arrays_of(owner: Any) -> list[Any]:
    """The arrays among an object's attributes, those in containers too.

    >>> from types import SimpleNamespace
    >>> owner = SimpleNamespace(weights={"a": np.ones(3), 1: [np.ones(2)]}, names=["a", "b"])
    >>> [array.shape for array in arrays_of(owner)]
    [(3,), (2,)]
    """
    if isinstance(owner, type | ModuleType):
        return []
    values = list(getattr(owner, "__dict__", {}).values())  # another thread may add one
    return [array for value in values if _is_worth_it(value) for array in _arrays_in(value)]


def _is_worth_it(value: Any) -> bool:
    """Whether to look through a value: not through a long list of words."""
    while isinstance(value, _CONTAINERS):
        value = next(_items(value), None)
    return not isinstance(value, _NEITHER)


def _arrays_in(value: Any) -> Iterator[Any]:
    if isinstance(value, _ARRAYS):
        yield value
    elif isinstance(value, _CONTAINERS):  # whose keys JAX might not be able to sort
        for item in _items(value):
            yield from _arrays_in(item)
    elif not isinstance(value, _NEITHER) and not jax.tree_util.all_leaves([value]):
        yield from (leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, _ARRAYS))


def _items(container: Any) -> Iterator[Any]:
    return iter(container.values() if isinstance(container, dict) else container)
