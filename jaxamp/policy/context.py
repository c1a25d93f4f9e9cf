"""The policy that is in force where library code runs.

It is that of the innermost ``policy_scope``, and inside of ``amp`` that of ``amp``.
"""

from __future__ import annotations

import asyncio
import dis
import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import jax

from jaxamp.core import jax_compat
from jaxamp.errors import PolicyError
from jaxamp.policy.policy import PrecisionPolicy

_F = TypeVar("_F", bound=Callable[..., Any])


def policy_scope(policy: Any) -> PolicyScope:
    """Put a policy in force, for a ``with`` block or, as a decorator, for a function.

    Each thread has its own scopes and each asyncio task too. ``jax.jit`` knows of them: a function
    that asks for the policy is traced once for each. In a coroutine a ``with`` block can be left
    for another task halfway, and compiled functions must not ask for the policy of such a block;
    decorate them instead, ``policy_scope(policy)(compiled)``. A notebook's cell is none unless it
    awaits.

    A scope changes what ``current_policy`` says and thereby what library code does. It does not
    rewrite anything: that is for ``amp``.

    Args:
      policy: whatever is accepted as a policy.

    Returns:
      A context manager, whose ``with`` block gets the policy, and which also decorates a function.
      It can be entered more than once.

    Raises:
      PolicyError: the policy is not understood.

    >>> with policy_scope("mixed_f16"):
    ...     print(current_policy())
    mixed_f16
    """
    return PolicyScope(PrecisionPolicy.parse(policy))


def current_policy() -> PrecisionPolicy:
    """Return the policy of the innermost scope or ``amp``; ``ALWAYS_F32`` outside of both.

    Returns:
      A ``PrecisionPolicy``.

    Raises:
      PolicyError: asked by a function that is being compiled, from a ``with`` block that asyncio
        may have left for another task.

    >>> print(current_policy())
    always_f32
    """
    entry = _own_entry()
    if _HELD.count and not (entry and entry.compilable) and jax_compat.is_tracing():
        raise PolicyError(
            "A function that is being traced asks for the current policy while an asyncio task "
            "has a `with policy_scope(...)` block open. Tasks take turns, so what is compiled now "
            "could be run under another task's policy. Decorate the compiled function instead: "
            "policy_scope(policy)(jax.jit(f))."
        )
    return entry.policy if entry else PrecisionPolicy.ALWAYS_F32


def in_amp() -> bool:
    """Return whether ``amp`` traces what runs here, with no ``policy_scope`` in between."""
    entry = _own_entry()
    return entry is not None and entry.rewrites


class PolicyScope(AbstractContextManager[PrecisionPolicy]):
    """A policy to put in force; made by ``policy_scope``. One scope can be entered many times."""

    __slots__ = ("policy",)

    def __init__(self, policy: PrecisionPolicy) -> None:
        self.policy = policy

    def __enter__(self) -> PrecisionPolicy:
        _enter(self.policy, compilable=not _in_async_task() or _is_with(sys._getframe(1)))
        return self.policy

    def __exit__(self, *exc_info: object) -> None:
        _leave()

    def __call__(self, fn: _F) -> _F:
        """Return the function with the policy in force whenever it runs."""
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise PolicyError(f"Use `with policy_scope(...)` inside the generator {fn!r}.")
        if inspect.iscoroutinefunction(fn):
            return self._around_coroutine(fn)

        @functools.wraps(fn)
        def scoped(*args: Any, **kwargs: Any) -> Any:
            with _whole(self.policy, rewrites=False):
                return fn(*args, **kwargs)

        return scoped  # type: ignore[return-value]

    def _around_coroutine(self, fn: Callable[..., Any]) -> Any:
        @functools.wraps(fn)
        async def scoped(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await fn(*args, **kwargs)

        return scoped

    def __repr__(self) -> str:
        return f"policy_scope({str(self.policy)!r})"


def amp_scope(policy: PrecisionPolicy) -> AbstractContextManager[None]:
    """Enter the scope in which ``amp`` traces a function, with its policy in force."""
    return _whole(policy, rewrites=True)


@contextmanager
def _whole(policy: PrecisionPolicy, *, rewrites: bool) -> Iterator[None]:
    """Enter a scope around one call: no other task comes between, and Ctrl-C ends it too."""
    seen_by_jit = _SEEN_BY_JIT(_number(policy))
    entry = _Entry(policy, threading.get_ident(), True, rewrites, seen_by_jit, _CURRENT.get())
    token = _CURRENT.set(entry)
    try:
        with seen_by_jit:
            yield
    finally:
        _CURRENT.reset(token)


class _Entry(NamedTuple):
    """A scope that was entered."""

    policy: PrecisionPolicy
    thread: int  # where: a copied context must not carry the scope to another thread
    compilable: bool  # whether jax.jit sees this very policy while the scope is innermost
    rewrites: bool  # whether amp is at work
    seen_by_jit: AbstractContextManager[None]
    outer: _Entry | None


class _Held(threading.local):
    """Number of this thread's scopes that asyncio may leave and enter again."""

    count = 0
    seen_by_jit: AbstractContextManager[None] = nullcontext()


_CURRENT: ContextVar[_Entry | None] = ContextVar("jaxamp_policy", default=None)
_SEEN_BY_JIT = jax.make_user_context(None)  # part of the key of every compiled function
_NUMBERS = itertools.count()
_HELD = _Held()


@functools.lru_cache(maxsize=1024)
def _number(policy: PrecisionPolicy) -> int:
    """Return a number that equal policies share: JAX hashes it at every compiled call."""
    return next(_NUMBERS)


def _enter(policy: PrecisionPolicy, *, compilable: bool) -> None:
    if compilable:
        seen_by_jit = _SEEN_BY_JIT(_number(policy))
        seen_by_jit.__enter__()
    else:
        seen_by_jit = nullcontext()
        if _HELD.count == 0:
            _HELD.seen_by_jit = _SEEN_BY_JIT("asyncio")  # no policy: nothing is compiled for it
            _HELD.seen_by_jit.__enter__()
        _HELD.count += 1
    thread = threading.get_ident()
    _CURRENT.set(_Entry(policy, thread, compilable, False, seen_by_jit, _CURRENT.get()))


def _leave() -> None:
    entry = _CURRENT.get()
    assert entry is not None, "a scope is left in the task that entered it"
    _CURRENT.set(entry.outer)
    entry.seen_by_jit.__exit__(None, None, None)
    if not entry.compilable:
        _HELD.count -= 1
        if _HELD.count == 0:
            _HELD.seen_by_jit.__exit__(None, None, None)


def _own_entry() -> _Entry | None:
    entry = _CURRENT.get()
    return entry if entry and entry.thread == threading.get_ident() else None


def _is_with(frame: FrameType) -> bool:
    """Return whether a frame runs a ``with`` statement that ends before any other task runs.

    A coroutine, and a generator, can be left halfway, and so can a block that is entered by a call.
    """
    code = frame.f_code
    may_be_left = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
    is_statement = dis.opname[code.co_code[frame.f_lasti]] == "BEFORE_WITH"  # up to Python 3.13
    return is_statement and not code.co_flags & may_be_left


def _in_async_task() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
