"""Regions of user code that keep a precision, marked by a name in the scope path.

A marker is a ``jax.named_scope`` with a reserved name. Scope names ride on the equations
themselves, so a region survives whatever a transformation does to the equations in it. An equation
of an inner jaxpr carries only the names entered inside that jaxpr: the outer ones are on the
equation that calls it, so the two paths are joined before a marker is looked for.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar, cast

import jax

from jaxamp.core.formats import Precision, PrecisionLike
from jaxamp.errors import NotCallableError, PolicyError, accepted, shown

_F = TypeVar("_F", bound=Callable[..., Any])

KEEPABLE = (Precision.F64, Precision.F32, Precision.F16, Precision.BF16)
MARKER = re.compile(r"keep_precision\[(" + "|".join(p.short for p in KEEPABLE) + r")\]")


_KEPT = jax.make_user_context(None)  # as part of the key of jax.jit's cache


def kept_around() -> Precision | None:
    """Return the precision of the region that this code runs in; ``None`` outside of any."""
    return _KEPT.value


def region_around() -> AbstractContextManager[Any]:
    """Return the region that this code runs in, for a trace that starts here and forgets scopes."""
    precision = kept_around()
    return nullcontext() if precision is None else marked(precision)


def marked(precision: Precision) -> Any:
    """Return a scope that marks its own equations; a call of ``amp`` in it has its own policy."""
    return jax.named_scope(f"keep_precision[{precision.short}]")


class Region:
    """A marked region: a context manager and a decorator; made by ``keep_precision``."""

    __slots__ = ("_entered", "precision")

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self._entered: list[Any] = []  # a stack, so that one region may be nested in itself

    def __enter__(self) -> None:
        scope = ExitStack()
        scope.enter_context(marked(self.precision))
        scope.enter_context(_KEPT(self.precision))
        self._entered.append(scope)

    def __exit__(self, *exc_info: Any) -> None:
        self._entered.pop().close()

    def __call__(self, fn: _F) -> _F:
        """Return the function with its whole body in the region."""
        if inspect.isclass(fn) or not callable(fn):
            raise NotCallableError(f"keep_precision decorates functions, not {fn!r}.")
        if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
            # Its body runs after the call has returned, outside of any scope entered here.
            raise NotCallableError(f"Use `with keep_precision(...)` inside the generator {fn!r}.")

        @functools.wraps(fn)
        def kept(*args: Any, **kwargs: Any) -> Any:
            with Region(self.precision):
                return fn(*args, **kwargs)

        return cast("_F", kept)

    def __repr__(self) -> str:
        return f"keep_precision({self.precision.short!r})"


def keep_precision(precision: PrecisionLike = Precision.F32) -> Region:
    """Mark a region of user code that is computed in a precision of its own.

    The mark survives ``jit``, ``grad``, ``vmap``, ``scan`` and ``remat``, and the backward pass of
    the region is in the region. The innermost region wins, and a region wins over rules and kinds.
    A function of ``amp`` that is called in it is computed in that precision too; apart from ``amp``
    it changes nothing.

    Args:
      precision: what ``Precision.parse`` reads; one of f64, f32, f16, bf16.

    Returns:
      A context manager that is also a decorator for functions and methods.

    Raises:
      PolicyError: the word names no precision that a region can have.
      NotCallableError: a function was given: the brackets are missing.

    >>> import jax.numpy as jnp
    >>> @keep_precision("f32")
    ... def loss(x):
    ...     return jnp.log(x).sum()
    >>> def model(x):
    ...     with keep_precision("f32"):
    ...         return jnp.tanh(x)
    """
    if inspect.isroutine(precision) or hasattr(precision, "__wrapped__"):
        raise NotCallableError(
            f"keep_precision was given {shown(precision)} where a precision is needed. As a "
            "decorator it has brackets: @keep_precision('f32')."
        )
    parsed = Precision.parse(precision)
    if parsed not in KEEPABLE:
        words = [p.short for p in KEEPABLE]
        raise PolicyError(f"A region cannot be kept in {parsed.short}. {accepted('', words)}")
    return Region(parsed)


@functools.lru_cache(maxsize=4096)
def kept_precision(scope: str) -> Precision | None:
    """Return the precision of the innermost region in a raw scope path, ``None`` outside of any.

    >>> kept_precision("transpose(jvp(keep_precision[f32]))/head")
    <Precision.F32: 'float32'>
    >>> kept_precision("head") is None
    True
    """
    words = MARKER.findall(scope)
    return Precision.parse(words[-1]) if words else None
