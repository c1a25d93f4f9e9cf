"""Calls of arrays alone, which ``jax.jit`` takes apart itself, in C++.

Most calls hold nothing but arrays. For these a function is compiled as it is called. What may be a
Python number, and what ``jax.jit`` does not take, is refused: such a call goes to a Runner, which
looks at every leaf and decides what is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxamp.core import taxonomy
from jaxamp.policy.settings import Settings, in_force
from jaxamp.run.emit import compiled, emit, nnx_adapter
from jaxamp.trace.arguments import Layout, Target, is_array

_NEVER = -1  # a version that the table never has


class Refusal(Exception):
    """A call may hold more than arrays."""


class Direct:
    """The compiled form of a function for calls of arrays.

    Attributes:
      form: what to call, as the function is called.
      version: of the table of kinds that it was made for.
    """

    def __init__(self, resolve: Callable[[], Callable[..., Any]], settings: Settings) -> None:
        self._resolve, self._settings = resolve, settings
        self._is_open = not settings.is_identity
        self._forms: dict[int, Callable[..., Any]] = {}
        self.form: Callable[..., Any] = resolve
        self.version = _NEVER

    def renew(self) -> bool:
        """Makes the form for the present table; unless a call was refused before.

        Trying costs more than a Runner does, so that one refusal is enough.
        """
        if self._is_open:
            resolve, settings = self._resolve, self._settings

            def region(*args: Any, **kwargs: Any) -> Any:
                return _emit(Target.of(resolve()), args, kwargs, in_force(settings))

            version = taxonomy.version
            new = compiled(region, Target.of(resolve()).name)
            self.form = self._forms.setdefault(version, new)  # threads share one
            self.version = version
        return self._is_open

    def refuses(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an error is about the arguments rather than the function's own; closes if so."""
        of_arrays = all(map(is_array, jax.tree.leaves((args, kwargs))))
        if of_arrays and not isinstance(error, Refusal):
            return False
        self._is_open, self.version = False, _NEVER
        return True


def _emit(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings) -> Any:
    leaves, treedef = target.flatten(args, kwargs)
    layout, constants = Layout.of(treedef), (None,) * len(leaves)
    has_objects = nnx_adapter(layout, leaves, constants) is not None
    if settings.is_identity or has_objects or any(map(_may_be_number, leaves)):
        raise Refusal
    return emit(target.function, layout, constants, leaves, settings, target.name)


def _may_be_number(leaf: Any) -> bool:
    """Whether ``jax.jit`` makes the same of a Python number."""
    aval = jax.typeof(leaf)
    if getattr(aval, "shape", None) != ():
        return False
    return getattr(aval, "weak_type", False) or aval.dtype == bool
