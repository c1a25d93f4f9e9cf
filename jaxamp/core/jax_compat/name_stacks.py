"""Read where equations come from: scopes, transformations, source lines and tracebacks."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from itertools import takewhile
from types import CodeType, FrameType
from typing import Any, NamedTuple

from jax._src import source_info_util as _source_info_util
from jax._src import traceback_util as _traceback_util
from jax.extend.core import JaxprEqn

# Functions that users call, as opposed to lax and to what traces and transforms.
_LIBRARY = re.compile(r"[/\\]jax[/\\]_src[/\\](nn|numpy|ops|scipy|image)[/\\]")

without_names = _source_info_util.reset_name_stack  # of the equations that are emitted around
boundary = _traceback_util.api_boundary  # errors that leave a function so marked lose hidden frames


def user_line(source_info: Any) -> str:
    """Return ``file:line (function)`` of the user's frame of an equation, as JAX prints it."""
    return _source_info_util.summarize(source_info)


@functools.lru_cache(maxsize=4096)  # each rule asks for those of an equation
def functions(traceback: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the user's functions and JAX's own on a call stack, innermost first."""
    codes = [code for code, _ in reversed(calls(traceback))]
    own = (c.co_qualname for c in codes if _source_info_util.is_user_filename(c.co_filename))
    return (*own,), (*(c.co_name for c in codes if _LIBRARY.search(c.co_filename)),)


def calls(traceback: Any) -> tuple[tuple[CodeType, int], ...]:
    """Return code and instruction of every frame of an equation's call stack, outermost first."""
    if traceback is None:
        return ()
    codes, instructions = traceback.raw_frames()
    return tuple(zip(reversed(codes), reversed(instructions), strict=True))


def user_frames(source_info: Any) -> tuple[tuple[str, int, str], ...]:
    """Return file, line and function of the user's frames of an equation, innermost first."""
    frames = _source_info_util.user_frames(source_info.traceback)
    return tuple((f.file_name, f.start_line, f.function_name) for f in frames)


def hide_frames(directory: str) -> None:
    """Exclude the files of ``directory`` from tracebacks and from equations' source lines."""
    _traceback_util.register_exclusion(directory)
    _source_info_util.register_exclusion(directory)


def user_level() -> int:
    """Return the ``stacklevel`` with which the caller's warning points at the user's line."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and not _source_info_util.is_user_filename(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def drop_frames(error: Exception, count: int) -> None:
    """Drop the outermost frames, from the one that handles an error on, from its traceback."""
    for _ in range(count):
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next


_Scope = _source_info_util.Scope


class CommonNames(NamedTuple):
    """Counts of the names that all name stacks of a group of equations begin with.

    After `entries` that are the same, `scopes` are so once transformations are left aside: what
    `jvp(layer/norm)` and `transpose(jvp(layer/norm))` have in common.
    """

    entries: int = 0
    scopes: int = 0


def common_names(eqns: Sequence[JaxprEqn]) -> CommonNames:
    """Return the name stack entries that all of `eqns` have in common."""
    stacks = [
        *{id(e.source_info.name_stack): e.source_info.name_stack.stack for e in eqns}.values()
    ]
    entries = _common(stacks)
    return CommonNames(entries, _common([_parted(stack[entries:])[1] for stack in stacks]))


def _common(stacks: Sequence[tuple[Any, ...]]) -> int:
    """Return the length of the common prefix of `stacks`."""
    return sum(
        1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*stacks, strict=False))
    )


def _parted(stack: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split a name stack into its leading transformations and the rest."""
    first = next((n for n, entry in enumerate(stack) if isinstance(entry, _Scope)), len(stack))
    return stack[:first], stack[first:]


def _within(stack: tuple[Any, ...], common: CommonNames) -> tuple[Any, ...]:
    """Return a name stack without the entries of `common`."""
    stack = stack[common.entries :]
    if not common.scopes:
        return stack
    transforms, names = _parted(stack)
    return transforms + names[common.scopes :]


def keep_common_names(eqn: JaxprEqn, common: CommonNames) -> JaxprEqn:
    """Return an equation whose name stack has the entries of `common` only."""
    stack = eqn.source_info.name_stack.stack
    _, names = _parted(stack[common.entries :])
    return _named(eqn, stack[: common.entries] + names[: common.scopes])


def drop_common_names(eqn: JaxprEqn, common: CommonNames) -> JaxprEqn:
    """Return an equation whose name stack lacks the entries of `common`."""
    return _named(eqn, _within(eqn.source_info.name_stack.stack, common))


def _named(eqn: JaxprEqn, stack: tuple[Any, ...]) -> JaxprEqn:
    info = eqn.source_info
    if stack == info.name_stack.stack:
        return eqn
    return eqn.replace(source_info=info.replace(name_stack=type(info.name_stack)(stack)))


def with_scope(name_stack: Any, name: str) -> Any:
    """Return a name stack with one more name, around its others and within transformations."""
    transforms, names = _parted(name_stack.stack)
    return type(name_stack)((*transforms, _Scope(name), *names))


def origin(eqn: JaxprEqn, common: CommonNames) -> tuple[Any, ...]:
    """Return an equation's traceback, its name stack without `common`, and its context."""
    info = eqn.source_info
    return info.traceback, _within(info.name_stack.stack, common), eqn.ctx
