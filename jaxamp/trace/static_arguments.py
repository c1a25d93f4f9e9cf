"""Constants of a call: how they are told apart, and held no longer than the caller holds them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakMethod, ref

from jaxamp.trace.contents import BY_IDENTITY, BY_VALUE, atom, content, has_value, is_known_apart
from jaxamp.trace.target import StaticValue

Constants = Sequence[Callable[[], Any] | None]  # per leaf of a call; None where it is traced


def constant_key(leaf: Any, *, captured: bool = False) -> Hashable:
    """Return a hashable key of a constant, which equals that of another where all is the same.

    A number or a word is its value; a function, a class, a module or an enum's member itself. Any
    other object is all that it holds, and itself as well unless its class has ``==`` and a hash.
    What is declared static is as good as what it equals, as for ``jax.jit``.

    Raises:
      Held: it holds arrays, and is not captured.

    >>> constant_key(1) == constant_key(True), constant_key("a") == constant_key("a")
    (False, True)
    """
    kind = type(leaf)
    if kind in BY_VALUE:
        return kind, leaf
    if kind in BY_IDENTITY:
        return _Identity(id(leaf))
    found = atom(leaf)
    if found is not None:
        return found
    if kind is StaticValue:
        value = leaf.value
        is_value = has_value(value)
        return kind, constant_key(value, captured=True) if is_value else identity_key(value)
    if is_known_apart(leaf):
        return (kind, leaf) if has_value(leaf) else identity_key(leaf)
    if kind is MethodType:
        owner, function = identity_key(leaf.__self__), identity_key(leaf.__func__)
        return kind, owner, function, content(leaf)
    if kind is slice or has_value(leaf):
        return _Valued(kind, content(leaf, captured=captured))
    return identity_key(leaf, content(leaf, captured=captured))


def hold(
    leaf: Any, key: Hashable = None, dropped: Callable[[Any], None] | None = None
) -> Callable[[], Any]:
    """Return something that returns `leaf`: weakly where identity is its key and it allows that."""
    if type(leaf) is StaticValue:
        return hold(leaf.value, key[1] if isinstance(key, tuple) else None, dropped)
    if key is None or isinstance(key, _Identity | _Walked):
        return _weakly(ref, leaf, dropped)
    if type(leaf) is MethodType:
        return _weakly(WeakMethod, leaf, dropped)
    return partial(_unchanged, leaf, key) if isinstance(key, _Valued) else lambda: leaf


def value_of(leaf: Any) -> Callable[[], Any]:
    """Return something that returns a constant, for a call that is looked at once."""
    value = leaf.value if type(leaf) is StaticValue else leaf
    return lambda: value


class _Identity(int):
    """The address of a constant that is known by identity."""

    __slots__ = ()


class Changed(Exception):
    """Leaves a trace for a constant that was equal to that of the call, and has changed since."""


class _Valued(NamedTuple):
    """A constant that is known by its class and by all that it holds."""

    kind: type
    content: Hashable


class _Walked(NamedTuple):
    """A constant that is known by identity and by all that it holds."""

    identity: _Identity
    content: Hashable


def identity_key(leaf: Any, held: Hashable = None) -> Hashable:
    """Return a key of a constant, and of what it holds, that equals only its own while it lives."""
    return _Identity(id(leaf)) if held is None else _Walked(_Identity(id(leaf)), held)


def _unchanged(leaf: Any, key: _Valued) -> Any:
    if content(leaf, captured=True) != key.content:
        raise Changed
    return leaf


def _weakly(kind: Any, leaf: Any, dropped: Callable[[Any], None] | None) -> Callable[[], Any]:
    try:
        return kind(leaf, dropped)
    except TypeError:
        return lambda: leaf
