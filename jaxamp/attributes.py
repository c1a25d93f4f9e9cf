"""Arrays that an object holds as attributes: a trace that has captured one must not go stale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

_ARRAYS = (jax.Array, np.ndarray)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_NEITHER = (str, bytes, int, float, complex, type(None), type, FunctionType)  # nor holds any
_LONG = 64  # items of a container


def arrays_of(owner: Any) -> list[Any]:
    """The arrays among an object's attributes, those in containers too.

    >>> from types import SimpleNamespace
    >>> owner = SimpleNamespace(weights={"a": np.ones(3), 1: [np.ones(2)]}, names=["a", "b"])
    >>> [array.shape for array in arrays_of(owner)]
    [(3,), (2,)]
    """
    owner = owner.__self__ if isinstance(owner, MethodType) else owner
    if isinstance(owner, type | ModuleType):
        return []
    pending = _attributes(owner)
    found: list[Any] = []
    seen: set[int] = set()
    for value in pending:
        if isinstance(value, _ARRAYS):
            found.append(value)
        elif isinstance(value, _CONTAINERS):  # whose keys JAX might not be able to sort
            if id(value) not in seen and not _is_long_text(value):
                seen.add(id(value))
                pending += _items(value)
        elif not isinstance(value, _NEITHER) and not jax.tree_util.all_leaves([value]):
            found += [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, _ARRAYS)]
    return found


def _attributes(owner: Any) -> list[Any]:
    if not hasattr(type(owner), "__slots__"):
        return list(getattr(owner, "__dict__", {}).values())  # another thread may add one
    state = object.__getstate__(owner)  # a dictionary, or that and one of slots; ``None`` for none
    parts = state if isinstance(state, tuple) else (state,)
    return [value for part in parts if part for value in part.values()]


def _is_long_text(container: Any) -> bool:
    """Whether it is not worth to look through what a container holds: a vocabulary, say."""
    return len(container) > _LONG and isinstance(next(iter(_items(container))), _NEITHER)


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def captured(closed: ClosedJaxpr, owners: Iterable[Any]) -> list[Any]:
    """Those of the arrays of objects that are constants of a program.

    >>> from types import SimpleNamespace
    >>> owner = SimpleNamespace(weight=jax.numpy.ones(3), seen=jax.numpy.zeros(3))
    >>> program = jax.make_jaxpr(lambda x: x * owner.weight)(owner.weight)
    >>> [array is owner.weight for array in captured(program, [owner])]
    [True]
    """
    arrays = [array for owner in owners for array in arrays_of(owner)]
    known = set(_constants(closed)) if arrays else ()
    return [array for array in arrays if _address(array) in known]


def are_held(arrays: Sequence[Any], owners: Iterable[Any]) -> bool:
    """Whether objects hold these very arrays still."""
    if not arrays:
        return True
    held = {id(array) for owner in owners for array in arrays_of(owner)}
    return all(id(array) in held for array in arrays)


def _constants(closed: ClosedJaxpr) -> Iterator[tuple[bool, int]]:
    """Addresses of the constants of a program, and of what it calls."""
    yield from map(_address, closed.consts)
    for eqn in closed.eqns:
        for param in eqn.params.values():
            for inner in param if isinstance(param, tuple) else (param,):
                if isinstance(inner, ClosedJaxpr):
                    yield from _constants(inner)


def _address(array: Any) -> tuple[bool, int]:
    """Of numpy's arrays that of their numbers: JAX captures a view of them."""
    array = getattr(array, "val", array)
    if isinstance(array, np.ndarray):
        return True, array.__array_interface__["data"][0]
    return False, id(array)
