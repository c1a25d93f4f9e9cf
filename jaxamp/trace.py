"""Tracing: from a call to a jaxpr, with everything that is not an array set aside.

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
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MethodType, WrapperDescriptorType
from typing import Any
from weakref import WeakMethod, ref

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, DebugInfo, valid_jaxtype

from jaxamp.errors import OutputError

Numbers = tuple[type, ...]
_AS_ARGUMENT: Numbers = (float, complex)
_AS_JIT: Numbers = (bool, int, float, complex)
_AS_CONSTANT: Numbers = ()
_BUILTIN_NODES = (tuple, list, dict, type(None))
_ARRAYS = (jax.Array, Tracer, jax.Ref)
_ARRAY_TYPES: set[type] = set()  # classes met so far: asking jax.Array is slow
_BY_VALUE = (str, int, bool, type(None), bytes)


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
            keys[0] = _identity(leaves[0])
        traced = [leaf for leaf, key in zip(leaves, keys, strict=True) if key is None]
        return traced, tuple(keys)

    def names(self, function: Callable[..., Any]) -> list[str]:
        """Every leaf as `function` knows it, e.g. ``params['w']``."""
        try:
            parameters = list(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            parameters = []
        call = jax.tree.unflatten(self.treedef, [object()] * len(self.numbers))
        before = {1: int(call[0] is not None)}
        before[3] = before[1] + len(call[1])
        paths = jax.tree_util.tree_flatten_with_path(call)[0]
        return [_leaf_name(path, parameters, before) for path, _ in paths]

    def join(self, traced: Sequence[Any], constants: Sequence[Callable[[], Any] | None]) -> Any:
        """Put a call together again from its traced leaves and its constants."""
        values = iter(traced)
        leaves = [next(values) if constant is None else constant() for constant in constants]
        return jax.tree.unflatten(self.treedef, leaves)


class Outputs:
    """What a traced function returned, apart from the arrays: the side channel of a compiled call.

    Instances travel as the auxiliary data of the compiled function's output tree, so whichever
    compiled form runs, its own constants come back with its arrays.
    """

    __slots__ = ("constants", "treedef")

    def __init__(self, treedef: Any, constants: Sequence[Callable[[], Any] | None]) -> None:
        self.treedef = treedef
        self.constants = constants

    def join(self, arrays: Sequence[Any]) -> Any:
        """The function's result, from its arrays."""
        values = iter(arrays)
        leaves = [next(values) if constant is None else constant() for constant in self.constants]
        return jax.tree.unflatten(self.treedef, leaves)


def trace(
    function: Callable[..., Any],
    layout: Layout,
    constants: Sequence[Callable[[], Any] | None],
    traced: Sequence[Any],
    name: str,
) -> tuple[ClosedJaxpr, Outputs]:
    """Trace `function` once.

    Args:
      function: the function, called with owner, bound and given arguments in that order.
      layout: how the call's leaves are treated.
      constants: per leaf ``None`` where it is traced, else what returns the constant.
      traced: arrays, tracers or ``jax.ShapeDtypeStruct`` for the traced leaves.
      name: the function's name, for error messages.

    Returns:
      The jaxpr over the traced leaves, in order, and what the function returned besides arrays.
    """
    outputs = None

    def flat(*values: Any) -> list[Any]:
        nonlocal outputs
        owner, bound_args, bound_kwargs, args, kwargs = layout.join(values, constants)
        selves = () if owner is None else (owner,)
        result = function(*selves, *bound_args, *args, **{**bound_kwargs, **kwargs})
        arrays, outputs = _part_result(result, constants)
        return arrays

    flat.__name__ = flat.__qualname__ = name
    vars(flat)["__fun_debug_info__"] = _debug_info(
        function,
        name,
        [n for n, c in zip(layout.names(function), constants, strict=True) if c is None],
    )
    with jax.disable_jit(False):  # the jaxpr is the same; running it obeys the user's setting
        jaxpr = jax.make_jaxpr(flat)(*traced)
    assert outputs is not None
    return jaxpr, outputs


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is something that JAX traces whatever the convention.

    >>> is_array(np.float32(1)), is_array(1.0), is_array("relu")
    (True, False, False)
    """
    if isinstance(leaf, _ARRAYS):
        _ARRAY_TYPES.add(type(leaf))
        return True
    return isinstance(leaf, (np.ndarray, np.generic)) and valid_jaxtype(leaf)


def constant_key(leaf: Any) -> Hashable:
    """A hashable stand-in for a constant: by value where it has one, by identity otherwise.

    >>> constant_key(1) == constant_key(True), constant_key("a") == constant_key("a")
    (False, True)
    """
    kind = type(leaf)
    if kind in _BY_VALUE:
        return kind, leaf
    if kind is float:
        return kind, leaf.hex()  # tells -0.0 from 0.0, and nan equals itself
    if kind is complex:
        return kind, leaf.real.hex(), leaf.imag.hex()
    if kind is slice:
        return kind, constant_key(leaf.start), constant_key(leaf.stop), constant_key(leaf.step)
    if kind is MethodType:
        return kind, _identity(leaf.__self__), _identity(leaf.__func__)
    if kind.__eq__ is object.__eq__:
        return _identity(leaf)
    try:
        hash(leaf)
    except TypeError:
        return _identity(leaf)
    return kind, leaf


def hold(leaf: Any, key: Hashable, dropped: Callable[[Any], None]) -> Callable[[], Any]:
    """Something that returns `leaf`: weakly where it is known by identity and allows that.

    Args:
      leaf: a constant of a call.
      key: its key.
      dropped: called when a weakly held `leaf` dies.
    """
    if isinstance(key, _Identity):
        return _weakly(ref, leaf, dropped)
    if type(leaf) is MethodType:
        return _weakly(WeakMethod, leaf, dropped)
    return lambda: leaf


class _Identity(int):
    """The address of a constant that is known by identity."""

    __slots__ = ()


def _identity(leaf: Any) -> _Identity:
    return _Identity(id(leaf))


def _weakly(kind: Any, leaf: Any, dropped: Callable[[Any], None]) -> Callable[[], Any]:
    try:
        return kind(leaf, dropped)
    except TypeError:
        return lambda: leaf


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


def _debug_info(function: Callable[..., Any], name: str, names: Sequence[str]) -> DebugInfo:
    """What JAX says of the function and of its inputs in error messages."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    source = f"{name} at {code.co_filename}:{code.co_firstlineno}" if code else name
    return DebugInfo("jit", source, tuple(names), None)


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


def _part_result(
    result: Any, constants: Sequence[Callable[[], Any] | None]
) -> tuple[list[Any], Outputs]:
    """Part a function's result into arrays and constants; an input constant stays weakly held."""
    leaves, treedef = jax.tree.flatten(result, is_leaf=_is_iterator)
    for leaf in leaves:
        _refuse_unfinished(leaf)
    given = {id(constant()): constant for constant in constants if constant is not None}
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    kept = [
        None if is_array(leaf) else given.get(id(leaf)) or (lambda leaf=leaf: leaf)
        for leaf in leaves
    ]
    return arrays, Outputs(treedef, kept)


def _refuse_unfinished(leaf: Any) -> None:
    """Raise where a returned object would go on computing after its trace has ended."""
    if _is_iterator(leaf):
        kind, advice = f"a {type(leaf).__name__}", "Return a list or tuple of its items."
    elif isinstance(leaf, FunctionType) and any(map(_is_tracer, _captured(leaf))):
        kind, advice = (
            f"the function {leaf.__qualname__}, which captures arrays computed in it",
            ("Return the arrays themselves, or jax.tree_util.Partial(function, *arrays)."),
        )
    elif any(map(_is_tracer, getattr(leaf, "__dict__", {}).values())):
        kind, advice = (
            f"a {type(leaf).__qualname__} that holds arrays computed in it",
            ("Return the arrays, or register the class with jax.tree_util.register_dataclass."),
        )
    else:
        return
    raise OutputError(f"A function under amp returned {kind}. {advice}")


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator | Coroutine | AsyncIterator)


def _captured(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _is_tracer(value: Any) -> bool:
    return isinstance(value, Tracer)
