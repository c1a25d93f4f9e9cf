"""Constants of a call: how they are told apart, and held no longer than the caller holds them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from types import MethodType
from typing import Any
from weakref import WeakMethod, ref

from jaxamp.trace.target import StaticValue

Constants = Sequence[Callable[[], Any] | None]  # per leaf of a call; None where it is traced

_BY_VALUE = (str, int, bool, type(None), bytes)


def constant_key(leaf: Any) -> Hashable:
    """Return a hashable key of a constant: by value where it has one, by identity otherwise.

    >>> constant_key(1) == constant_key(True), constant_key("a") == constant_key("a")
    (False, True)
    """
    kind = type(leaf)
    if kind in _BY_VALUE:
        return kind, leaf
    if kind is StaticValue:
        return kind, constant_key(leaf.value)
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


def hold(
    leaf: Any, key: Hashable = None, dropped: Callable[[Any], None] | None = None
) -> Callable[[], Any]:
    """Return something that returns `leaf`: weakly where identity is its key and it allows that.

    Args:
      leaf: a constant of a call, or its function.
      key: the constant's key; left out, identity.
      dropped: called when a weakly held `leaf` dies.
    """
    if type(leaf) is StaticValue:
        return hold(leaf.value, constant_key(leaf.value), dropped)
    if key is None or isinstance(key, _Identity):
        return _weakly(ref, leaf, dropped)
    if type(leaf) is MethodType:
        return _weakly(WeakMethod, leaf, dropped)
    return lambda: leaf


def value_of(leaf: Any) -> Callable[[], Any]:
    """Return something that returns a constant, for a call that is looked at once."""
    value = leaf.value if type(leaf) is StaticValue else leaf
    return lambda: value


class _Identity(int):
    """The address of a constant that is known by identity."""

    __slots__ = ()


def identity_key(leaf: Any) -> Hashable:
    """Return a key of a constant that equals only its own; valid while the constant lives."""
    return _Identity(id(leaf))


def _weakly(kind: Any, leaf: Any, dropped: Callable[[Any], None] | None) -> Callable[[], Any]:
    try:
        return kind(leaf, dropped)
    except TypeError:
        return lambda: leaf
