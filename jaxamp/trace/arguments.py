"""Calls: a callable and its arguments, taken apart into what is traced and what is constant.

What is traced, and what is a constant of the trace:

* jax and numpy arrays, numpy scalars, tracers, keys and Refs are traced;
* Python ``float`` and ``complex`` arguments are traced (weakly typed, as ``jax.jit`` does), so that
  a new learning rate costs no new trace; a function that needs their values gets them instead;
* ``bool``, ``int``, ``str``, ``None``, functions and any other object are constants, because
  programs use them as switches, sizes and axes;
* inside a container class the container's own convention holds: every number that is no array is a
  constant of an equinox module, and is traced in any other registered class;
* what is bound beforehand (``functools.partial``, ``self``) keeps its Python numbers as constants.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType, WrapperDescriptorType
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import valid_jaxtype

from jaxamp.trace.static_arguments import Constants, constant_key, identity_key

Numbers = tuple[type, ...]
_AS_ARGUMENT: Numbers = (float, complex)
_AS_JIT: Numbers = (bool, int, float, complex)
_AS_CONSTANT: Numbers = ()
_BUILTIN_NODES = (tuple, list, dict, type(None))
_ARRAYS = (jax.Array, Tracer, jax.Ref)
_ARRAY_TYPES: set[type] = set()  # classes met so far: asking jax.Array is slow


@dataclass(frozen=True, slots=True)
class Target:
    """A callable taken apart: the function itself and what is bound to it.

    Attributes:
      function: what is called in the end.
      owner: the ``self`` of a bound method or of a callable object; ``None`` where there is none.
      args: positional arguments bound by ``functools.partial``.
      kwargs: keyword arguments bound by ``functools.partial``.
      name: a word for messages and for the compiled function.
    """

    function: Callable[..., Any]
    owner: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Target:
        """Take `fn` apart.

        >>> import functools
        >>> target = Target.of(functools.partial(max, 3))
        >>> target.name, target.args
        ('max', (3,))
        """
        args, kwargs = (), {}
        while isinstance(fn, partial):
            args, kwargs, fn = fn.args + args, {**fn.keywords, **kwargs}, fn.func
        name = getattr(fn, "__name__", type(fn).__name__)
        if isinstance(fn, MethodType):
            return cls(fn.__func__, fn.__self__, args, kwargs, name)
        if _is_plain_object(fn):
            return cls(type(fn).__call__, fn, args, kwargs, name)
        return cls(fn, None, args, kwargs, name)

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        """Leaves and structure of ``(owner, bound args, bound kwargs, args, kwargs)``."""
        return jax.tree.flatten((self.owner, self.args, self.kwargs, args, kwargs))


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How a call's leaves are treated, for one tree structure. Compared by identity.

    Attributes:
      treedef: structure of ``(owner, bound args, bound kwargs, args, kwargs)``.
      numbers: for every leaf the types of Python numbers that are traced there.
      owned: whether the first leaf is an owner that is no container, held by identity.
      nodes: the classes of the containers.
    """

    treedef: Any
    numbers: tuple[Numbers, ...]
    owned: bool
    nodes: frozenset[type]

    @classmethod
    def of(cls, treedef: Any) -> Layout:
        """The layout of `treedef`."""
        owner, bound_args, bound_kwargs, args, kwargs = treedef.children()
        numbers: list[Numbers] = []
        nodes: set[type] = set()
        for part in (owner, bound_args, bound_kwargs):
            _conventions(part, _AS_CONSTANT, numbers, nodes)
        for part in (args, kwargs):
            _conventions(part, _AS_ARGUMENT, numbers, nodes)
        return cls(treedef, tuple(numbers), _is_leaf(owner), frozenset(nodes))

    def concrete(self, leaves: Sequence[Any]) -> Layout | None:
        """The layout in which float arguments are constants; ``None`` if `leaves` has none."""
        pairs = zip(leaves, self.numbers, strict=True)
        if not any(numbers is _AS_ARGUMENT and type(leaf) in numbers for leaf, numbers in pairs):
            return None
        numbers = (_AS_CONSTANT if n is _AS_ARGUMENT else n for n in self.numbers)
        return replace(self, numbers=tuple(numbers))

    def split(
        self, leaves: Sequence[Any], *, abstract: bool = False
    ) -> tuple[list[Any], tuple[Hashable, ...]]:
        """Part `leaves` into those that are traced and the keys of the others.

        Args:
          leaves: the call's leaves.
          abstract: let ``jax.ShapeDtypeStruct`` stand for an array.

        Returns:
          The traced leaves, and one key per leaf: ``None`` for a traced one, otherwise something
          hashable that equals another call's key exactly when the constant is the same.
        """
        if _ARRAY_TYPES.issuperset(map(type, leaves)):
            return list(leaves), (None,) * len(leaves)
        keys = [
            None
            if (kind := type(leaf)) in _ARRAY_TYPES or kind in numbers or is_array(leaf)
            else constant_key(leaf)
            for leaf, numbers in zip(leaves, self.numbers, strict=True)
        ]
        if abstract:
            structs = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]
            keys = [None if s else key for s, key in zip(structs, keys, strict=True)]
        if self.owned and keys[0] is not None:
            keys[0] = identity_key(leaves[0])
        traced = [leaf for leaf, key in zip(leaves, keys, strict=True) if key is None]
        return traced, tuple(keys)

    def names(self, function: Callable[..., Any]) -> list[str]:
        """Every leaf as `function` knows it, e.g. ``params['w']``."""
        try:
            parameters = list(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            parameters = []
        try:
            call = jax.tree.unflatten(self.treedef, [object()] * len(self.numbers))
        except Exception:  # a container that insists on arrays; names only serve messages
            return [""] * len(self.numbers)
        before = {1: int(call[0] is not None)}
        before[3] = before[1] + len(call[1])
        paths = jax.tree_util.tree_flatten_with_path(call)[0]
        return [_leaf_name(path, parameters, before) for path, _ in paths]

    def join(self, traced: Sequence[Any], constants: Constants) -> Any:
        """Put a call together again from its traced leaves and its constants."""
        values = iter(traced)
        leaves = [next(values) if constant is None else constant() for constant in constants]
        return jax.tree.unflatten(self.treedef, leaves)


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is something that JAX traces whatever the convention.

    >>> is_array(np.float32(1)), is_array(1.0), is_array("relu")
    (True, False, False)
    """
    if isinstance(leaf, _ARRAYS):
        _ARRAY_TYPES.add(type(leaf))
        return True
    return isinstance(leaf, (np.ndarray, np.generic)) and valid_jaxtype(leaf)


def _is_plain_object(fn: Any) -> bool:
    """Whether `fn` is an object whose class says in Python how it is called."""
    return not isinstance(type(fn).__call__, WrapperDescriptorType)


def _conventions(treedef: Any, numbers: Numbers, out: list[Numbers], nodes: set[type]) -> None:
    """Append, for every leaf of `treedef`, the types of numbers that are traced there."""
    data = treedef.node_data()
    if data is None:  # a leaf
        out.append(numbers)
        return
    nodes.add(data[0])
    for child in treedef.children():
        _conventions(child, _inside(data[0], numbers), out, nodes)


def _inside(node: type, numbers: Numbers) -> Numbers:
    equinox = sys.modules.get("equinox")
    if equinox is not None and issubclass(node, equinox.Module):
        return _AS_CONSTANT
    return numbers if issubclass(node, _BUILTIN_NODES) else _AS_JIT


def _is_leaf(treedef: Any) -> bool:
    return treedef.node_data() is None


def _leaf_name(path: Any, parameters: Sequence[str], before: Mapping[int, int]) -> str:
    part: int = path[0].idx
    if part == 0:
        return f"self{jax.tree_util.keystr(path[1:])}"
    if part in before:
        place = path[1].idx + before[part]
        name = parameters[place] if place < len(parameters) else f"args[{place}]"
    else:
        name = path[1].key
    return f"{name}{jax.tree_util.keystr(path[2:])}"


def is_found(function: Any) -> bool:
    """Whether the name of `function` leads to it, from its module: what pickle needs to know."""
    found: Any = sys.modules.get(getattr(function, "__module__", ""))
    for name in getattr(function, "__qualname__", "").split("."):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    return found is function
