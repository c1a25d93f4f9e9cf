"""Constants of a call: how they are told apart, and held no longer than the caller holds them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakMethod, ref

from jaxamp.attributes import arrays_of

Constants = Sequence[Callable[[], Any] | None]  # per leaf of a call; None where it is traced

_BY_VALUE = (str, int, bool, type(None), bytes)


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
        return kind, identity_key(leaf.__self__), identity_key(leaf.__func__)
    if kind.__eq__ is object.__eq__:
        return identity_key(leaf)
    try:
        hash(leaf)
    except TypeError:
        return identity_key(leaf)
    return kind, leaf


def hold(leaf: Any, key: Hashable, dropped: Callable[[Any], None]) -> Callable[[], Any]:
    """Something that returns `leaf`: weakly where it is known by identity and allows that.

    Args:
      leaf: a constant of a call.
      key: its key.
      dropped: called when a weakly held `leaf` dies.
    """
    if isinstance(key, _Identity | _Bearer):
        held, bearer = _weakly(ref, leaf, dropped), leaf
    elif type(leaf) is MethodType:
        held, bearer = _weakly(WeakMethod, leaf, dropped), leaf.__self__
    else:
        return lambda: leaf
    arrays = arrays_of(bearer)
    return partial(_beside, arrays, held) if arrays else held


def kept(leaves: Sequence[Any], keys: Sequence[Hashable]) -> Constants:
    """What returns the constants among `leaves`, for a call that is looked at once."""
    pairs = zip(leaves, keys, strict=True)
    return [None if key is None else lambda leaf=leaf: leaf for leaf, key in pairs]


class _Identity(int):
    """The address of a constant that is known by identity."""

    __slots__ = ()


class _Bearer(tuple[int, ...]):
    """The address of such a constant, and those of the arrays that it bears as attributes."""

    __slots__ = ()


def identity_key(leaf: Any) -> Hashable:
    """A stand-in for a constant that is only equal to itself, as long as it bears the same arrays.

    It is valid while the constant and its arrays live.
    """
    arrays = arrays_of(leaf)
    return _Bearer(map(id, (leaf, *arrays))) if arrays else _Identity(id(leaf))


def is_outdated(old: Sequence[Hashable], new: Sequence[Hashable]) -> bool:
    """Whether the keys of two calls differ in arrays alone that the same constants bear."""
    return all(a == b or _is_same_bearer(a, b) for a, b in zip(old, new, strict=True))


def _is_same_bearer(old: Hashable, new: Hashable) -> bool:
    return isinstance(old, _Bearer) and isinstance(new, _Bearer) and old[0] == new[0]


def _beside(arrays: Sequence[Any], held: Callable[[], Any]) -> Any:
    """What is held; the arrays live on beside it, so that no other can have their addresses."""
    return held()


def _weakly(kind: Any, leaf: Any, dropped: Callable[[Any], None]) -> Callable[[], Any]:
    try:
        return kind(leaf, dropped)
    except TypeError:
        return lambda: leaf
