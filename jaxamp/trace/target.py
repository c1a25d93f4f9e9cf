"""A callable taken apart: the function itself, what is bound to it, which arguments are static."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import MethodType, WrapperDescriptorType
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from jaxamp.core import jax_compat
from jaxamp.errors import StaticArgumentError, accepted, shown


class StaticValue:
    """An argument that is declared static: one opaque leaf, whatever containers it is made of."""

    __slots__ = ("value",)

    def __init__(self, value: Any, name: str) -> None:
        self.value = value
        try:
            hash(value)
        except TypeError:
            is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))
            cure = (
                "A transformation around amp traces its numbers. Declare it static there too: "
                f"jax.jit(fn, static_argnums={name})."
                if is_traced
                else "Give a tuple instead of a list, or freeze its dataclass (frozen=True)."
            )
            raise StaticArgumentError(
                f"The static argument {name} has to be hashable, and {shown(value)} of type "
                f"{type(value).__qualname__} is not: it is part of the key of what is compiled. "
                f"{cure}"
            ) from None


class Statics(NamedTuple):
    """The static parameters of a function, by position and by name.

    >>> Statics.of(lambda x, mode: x, argnames="mode")
    Statics(positions=frozenset({1}), names=frozenset({'mode'}))
    """

    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, fn: Any, argnums: Any = (), argnames: Any = ()) -> Statics:
        """Complete positions in a signature by names, and names by positions, as ``jax.jit`` does.

        Raises:
          StaticArgumentError: the function has no such parameter.
        """
        argnums, argnames = _several(argnums), _several(argnames)
        if not argnums and not argnames:
            return cls()
        for wrong, of, other in ((argnums, int, "argnames"), (argnames, str, "argnums")):
            if found := [given for given in wrong if not isinstance(given, of)]:
                raise StaticArgumentError(
                    "static_argnums takes positions and static_argnames takes names: write "
                    f"static_{other}={found[0]!r}."
                )
        try:
            parameters = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError):  # a builtin, say
            return cls(frozenset(argnums), frozenset(argnames))
        kinds = {p.kind for p in parameters}
        ordered = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, _POSITIONAL)]
        known = [p.name for p in parameters if p.kind in (_POSITIONAL, p.KEYWORD_ONLY)]
        positions = {n + len(ordered) if n < 0 else n for n in argnums}
        if min(positions, default=0) < 0 or (
            inspect.Parameter.VAR_POSITIONAL not in kinds
            and max(positions, default=-1) >= len(ordered)
        ):
            raise StaticArgumentError(
                f"static_argnums={argnums} names a position that the function does not have: it "
                f"takes {len(ordered)} by position."
            )
        for name in argnames:
            if name not in known and inspect.Parameter.VAR_KEYWORD not in kinds:
                raise StaticArgumentError(
                    f"static_argnames has {name!r}, which is not a parameter of the function. "
                    f"{accepted(name, known)}"
                )
        names = {*argnames, *(ordered[n] for n in positions if n < len(ordered))}
        positions |= {ordered.index(name) for name in names if name in ordered}
        return cls(frozenset(positions), frozenset(names))

    def shifted(self, count: int) -> Statics:
        """Move positions by `count` arguments; bound ones have negative positions."""
        return Statics(frozenset(n + count for n in self.positions), self.names)

    def __or__(self, other: Any) -> Statics:
        return Statics(self.positions | other.positions, self.names | other.names)

    def __bool__(self) -> bool:
        return bool(self.positions or self.names)

    def mark(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], start: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make static arguments opaque."""
        marked = tuple(
            StaticValue(arg, str(n)) if n in self.positions else arg
            for n, arg in enumerate(args, start)
        )
        named = {k: StaticValue(v, k) if k in self.names else v for k, v in kwargs.items()}
        return marked, named


_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _several(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    return (given,) if is_one else tuple(given)


@dataclass(frozen=True, slots=True)
class Target:
    """A callable taken apart.

    Attributes:
      function: what is called in the end.
      owner: the ``self`` of a bound method or of a callable object; ``None`` where there is none.
      args: positional arguments bound by ``functools.partial``.
      kwargs: keyword arguments bound by ``functools.partial``.
      name: a word for messages and for the compiled function.
      statics: static parameters; the owner and bound arguments count as positions.
      is_bare: whether `function` is called with the arguments of the call and no others.
      bound: keys of what is bound, by identity, once it has been read.
    """

    function: Callable[..., Any]
    owner: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    statics: Statics = Statics()  # noqa: RUF009
    is_bare: bool = False
    bound: dict[int, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, fn: Callable[..., Any], statics: Statics | None = None) -> Target:
        """Split `fn` into the function, the object it is bound to, and its bound arguments.

        >>> import functools
        >>> target = Target.of(functools.partial(max, 3))
        >>> target.name, target.args
        ('max', (3,))
        """
        given, args, kwargs = fn, (), {}
        while isinstance(fn, partial):
            args, kwargs, fn = fn.args + args, {**fn.keywords, **kwargs}, fn.func
        name, owner = getattr(fn, "__name__", type(fn).__name__), None
        if isinstance(fn, MethodType):
            fn, owner = fn.__func__, fn.__self__
        elif not isinstance(type(fn).__call__, WrapperDescriptorType):  # called in Python
            fn, owner = type(fn).__call__, fn
        static = Statics(*jax_compat.static_parameters(fn))
        if statics:
            static |= statics.shifted(len(args) + (owner is not None))
        return cls(fn, owner, args, kwargs, name, static, fn is given and not static)

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        """Flatten ``(owner, bound args, bound kwargs, args, kwargs)``."""
        bound_args, bound_kwargs = self.args, self.kwargs
        if self.statics:
            start = int(self.owner is not None)
            bound_args, bound_kwargs = self.statics.mark(bound_args, bound_kwargs, start)
            args, kwargs = self.statics.mark(args, kwargs, start + len(bound_args))
        return jax.tree.flatten((self.owner, bound_args, bound_kwargs, args, kwargs))


def is_found(function: Any) -> bool:
    """Return whether the qualified name of `function` leads to it, as pickle requires."""
    found: Any = sys.modules.get(getattr(function, "__module__", ""))
    for name in getattr(function, "__qualname__", "").split("."):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    return found is function
