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
    >>> owner = SimpleNamespace(weights={"a": np.ones(3), "b": [np.ones(2)]}, names=["a", "b"])
    >>> [array.shape for array in arrays_of(owner)]
    [(3,), (2,)]
    """
    if isinstance(owner, type | ModuleType):
        return []
    values = list(getattr(owner, "__dict__", {}).values())  # another thread may add one
    held = [v for v in values if _may_hold_arrays(v)]
    return [x for x in jax.tree.leaves(held) if isinstance(x, _ARRAYS)] if held else []


def _may_hold_arrays(value: Any) -> bool:
    """Whether it is worth to look through a value: a long list of words is not."""
    while isinstance(value, _CONTAINERS):
        value = next(_items(value), None)
    if isinstance(value, _NEITHER):
        return False
    return isinstance(value, _ARRAYS) or not jax.tree_util.all_leaves([value])


def _items(container: Any) -> Iterator[Any]:
    return iter(container.values() if isinstance(container, dict) else container)
