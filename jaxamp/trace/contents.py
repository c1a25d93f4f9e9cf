"""Look into objects that JAX knows nothing of: their parts, and a key of all of them.

Containers are their items, objects their attributes, and what Python and numpy bring along is what
they are copied by. Functions, classes and modules are what they are: nobody looks into them.
"""

from __future__ import annotations

import array
import dataclasses
import enum
import io
import sys
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Hashable, Iterator
from functools import partial
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any
from weakref import ref

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import valid_jaxtype

ARRAY_TYPES: set[type] = set()  # classes met so far: asking jax.Array is slow
BY_VALUE = frozenset({str, int, bool, type(None), bytes})
BY_IDENTITY: set[type] = {FunctionType}  # and other classes whose objects are, as they are met
UNFINISHED = Iterator, Coroutine, AsyncIterator
_ARRAYS = (jax.Array, Tracer, jax.Ref)
_WHOLE = (type, ModuleType, FunctionType, enum.Enum)
_NUMBERS_AND_WORDS: tuple[Any, ...] = (str, bytes, int, float, complex)
_BUILTIN = (dict, list, tuple, set, frozenset, np.ndarray)
_BUFFERS = (bytearray, memoryview, array.array)
_BOUND = (MethodType, partial)
_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_JAX = {"jax", "jaxlib", "jaxamp"}  # their objects do not change, or have an == that says it
_COPIED = {*sys.stdlib_module_names, "numpy"}  # theirs say what they consist of when copied

Part = tuple[str, Any, Any]  # the text of its place, with braces for a name; the name; the part


def is_array(leaf: Any) -> bool:
    """Return whether `leaf` is an array, which JAX traces whatever the convention.

    >>> is_array(np.float32(1)), is_array(1.0), is_array("relu")
    (True, False, False)
    """
    if isinstance(leaf, _ARRAYS):
        ARRAY_TYPES.add(type(leaf))
        return True
    return isinstance(leaf, (np.ndarray, np.generic)) and valid_jaxtype(leaf)


def is_known_apart(value: Any) -> bool:
    """Return whether identity, or an ``==`` that can be trusted, says all of an object."""
    kind = type(value)
    if kind in BY_IDENTITY or isinstance(value, _WHOLE):
        return True
    is_function = callable(value) and not isinstance(value, _BOUND)
    if _root(kind) not in (_JAX | _COPIED if is_function else _JAX):
        return False
    if kind.__eq__ is object.__eq__:
        BY_IDENTITY.add(kind)
    return True


def has_value(value: Any) -> bool:
    """Return whether a class says by ``==`` and ``hash`` that equal objects are as good as one."""
    if type(value).__eq__ is object.__eq__:
        return False
    try:
        hash(value)
    except Exception:  # that of something inside
        return False
    return True


def atom(value: Any) -> Hashable:
    """Return a key of a number, a word or the like; ``None`` for anything else."""
    kind = type(value)
    if kind in BY_VALUE:
        return kind, value
    if kind is float:
        return kind, value.hex()  # tells -0.0 from 0.0, and nan equals itself
    if kind is complex:
        return kind, value.real.hex(), value.imag.hex()
    return None


class Held(Exception):
    """Ends the reading of an object that holds what no key can stand for.

    Args:
      part: an array, or an iterator whose state cannot be read.
    """


class Alive:
    """An object known by identity, inside of another; equals nothing once that object is dead."""

    __slots__ = ("address", "resolve")

    def __init__(self, value: Any) -> None:
        self.address = id(value)
        try:
            self.resolve = ref(value)
        except TypeError:
            self.resolve = lambda: value

    def __eq__(self, other: object) -> bool:
        is_one = isinstance(other, Alive) and self.address == other.address
        return is_one and self.resolve() is not None

    def __hash__(self) -> int:
        return self.address


def content(value: Any, *, captured: bool = False) -> Hashable:
    """Return a key that equals another one exactly when all that the two objects hold is the same.

    If it is `captured`, arrays in it are constants: jax's are known by identity, numpy's by value.

    Raises:
      Held: it holds an array and is not captured, or an iterator that cannot be read.

    >>> content([True]) == content([1]), content({"a": [1]}) == content({"a": [1]})
    (False, True)
    """
    return _Reader(captured).read(value)


def parts(value: Any, *, captures: bool = False) -> Iterator[Part]:
    """Yield the parts of an object, with `captures` what a function captures among them.

    There are none of what is one: a number, an array, a class.
    """
    kind = type(value)
    is_whole = isinstance(value, (type, ModuleType, enum.Enum))
    if is_whole or atom(value) is not None or is_array(value):
        return
    if isinstance(value, FunctionType):
        yield from _captured(value) if captures else ()
        return
    if is_known_apart(value):
        yield "", None, getattr(value, "__wrapped__", None)  # by jax.jit, say
        return
    yield from (items := [*_items(value)])
    if kind not in _BUILTIN:
        yield from (attributes := [*_attributes(value)])
        yield from _copied_by(value, always=not (items or attributes))


def place_of(wanted: Any, value: Any) -> str:
    """Return where in an object one of its parts is, e.g. ``.state['w'][0]``; empty if unknown."""
    layer, seen = [("", value)], {id(value): value}
    while layer:
        after = []
        for path, held in layer:
            if held is wanted:
                return path
            for text, name, part in parts(held):
                if id(part) not in seen:
                    seen[id(part)] = part
                    after.append((path + text.format(name), part))
        layer = after
    return ""


def reachable(value: Any) -> Iterator[Any]:
    """Yield an object and all that it refers to, and what functions in it capture."""
    seen, waiting = {id(value): value}, [value]
    while waiting:
        held = waiting.pop()
        yield held
        for _, _, part in parts(held, captures=True):
            if id(part) not in seen:
                seen[id(part)] = part
                waiting.append(part)


def objects_in(data: Any) -> Iterator[Any]:
    """Yield the objects in `data` that have attributes and no ``==``: these may change unseen."""
    seen, waiting = {id(data): data}, [data]
    while waiting:
        held = waiting.pop()
        if callable(held) or is_known_apart(held):
            continue
        inside = [part for _, _, part in parts(held) if id(part) not in seen]
        if inside and type(held).__eq__ is object.__eq__:
            yield held
        else:
            seen.update({id(part): part for part in inside})
            waiting += inside


class _Reader:
    """Reads one object; what it meets again, it calls by the number of the first time."""

    __slots__ = ("captured", "seen")

    def __init__(self, captured: bool) -> None:
        self.captured = captured
        self.seen: dict[int, tuple[int, Any]] = {}

    def read(self, value: Any) -> Hashable:
        found = atom(value)
        if found is not None:
            return found
        if isinstance(value, np.generic):
            return type(value), value.dtype.str, value.tobytes()
        if is_array(value):
            return self.of_array(value)
        if is_known_apart(value):
            return (type(value), value) if has_value(value) else Alive(value)
        if id(value) in self.seen:
            return self.seen[id(value)][0]
        self.seen[id(value)] = len(self.seen), value
        return self.of_object(value)

    def of_array(self, value: Any) -> Hashable:
        if not self.captured:
            raise Held(value)
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes()
        return Alive(value)

    def of_object(self, value: Any) -> Hashable:
        kind = type(value)
        if isinstance(value, _BUFFERS):
            view = memoryview(value)
            return kind, view.format, view.shape, view.tobytes()
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return kind, value.dtype.str, value.shape, value.tobytes()
        # Who binds an array says that it is a constant; what draws numbers has some of its own.
        is_constant = isinstance(value, (*_BOUND, *_GENERATORS))
        before, self.captured = self.captured, self.captured or is_constant
        found = [(self.read(name), self.read(part)) for _, name, part in parts(value)]
        self.captured = before
        if not found and kind not in _BUILTIN:
            if isinstance(value, UNFINISHED) and not isinstance(value, io.IOBase):
                raise Held(value)
            return (kind, value) if has_value(value) else Alive(value)
        inside = frozenset(found) if isinstance(value, set | frozenset) else tuple(found)
        return kind if kind.__eq__ is not object.__eq__ else Alive(value), inside


def _root(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _items(value: Any) -> Iterator[Part]:
    if isinstance(value, dict | MappingProxyType):
        held = {**value} if isinstance(value, MappingProxyType) else value
        yield from (("", None, key) for key in dict.keys(held))
        yield from (("[{!r}]", key, part) for key, part in dict.items(held))
    elif isinstance(value, list | tuple | deque):
        yield from (("[{}]", place, part) for place, part in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from (("", None, part) for part in value)
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        yield "", None, value.shape
        yield from (("[{}]", place, part) for place, part in enumerate(value.ravel().tolist()))
    for base in _NUMBERS_AND_WORDS:
        if isinstance(value, base):
            yield "", None, base.__getnewargs__(value)[0]


def _attributes(value: Any) -> Iterator[Part]:
    """Yield the attributes of an object; a dataclass that has a hash is its fields."""
    kind = type(value)
    if dataclasses.is_dataclass(kind) and has_value(value):
        names = [field.name for field in dataclasses.fields(kind)]
        yield from ((".{}", name, getattr(value, name, None)) for name in names)
        return
    state: Any = object.__getstate__(value)
    for some in state if isinstance(state, tuple) else (state,):
        yield from ((".{}", name, part) for name, part in (some or {}).items())


def _copied_by(value: Any, *, always: bool) -> Iterator[Part]:
    """Yield what a class of Python's or numpy's says that a copy consists of; others if `always`.

    The last are classes of compiled libraries, which have no attributes that are seen.
    """
    own = (cls for cls in type(value).__mro__ if {"__reduce__", "__reduce_ex__"} & {*vars(cls)})
    says = next(own)
    if says is object or not (always or _root(says) in _COPIED):
        return
    try:
        _, *held = value.__reduce_ex__(2)
    except Exception:  # a class may refuse to be copied in any way
        return
    for part in held:
        yield "", None, tuple(part) if isinstance(part, Iterator) else part


def _captured(function: FunctionType) -> Iterator[Part]:
    yield "", None, function.__defaults__
    yield "", None, function.__kwdefaults__
    for cell in function.__closure__ or ():
        try:
            yield "", None, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
