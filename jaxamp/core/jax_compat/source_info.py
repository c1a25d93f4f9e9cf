"""Source lines and tracebacks."""

from __future__ import annotations

import functools
import re
import sys
from types import CodeType, FrameType
from typing import Any

from jax._src import source_info_util as _source_info_util
from jax._src import traceback_util as _traceback_util

# Functions that users call, as opposed to lax and to what traces and transforms.
_LIBRARY = re.compile(r"[/\\]jax[/\\]_src[/\\](nn|numpy|ops|scipy|image)[/\\]")

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
