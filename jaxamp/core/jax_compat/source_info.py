"""Source lines and tracebacks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax._src import source_info_util as _source_info_util
from jax._src import traceback_util as _traceback_util
from jax._src.lib import _jax as _xla  # pyright: ignore[reportPrivateImportUsage]

boundary = _traceback_util.api_boundary  # errors that leave a function so marked lose hidden frames
_Traceback = _xla.Traceback
_current = _source_info_util.current
_wanting_rules: list[int] = []  # threads inside of `lines_of_backward_rules`
_changing = threading.Lock()


@contextmanager
def lines_of_backward_rules() -> Iterator[None]:
    """Gives operations of ``custom_vjp`` backward rules the lines where those were written.

    JAX gives to all that a backward pass emits the line of the forward operation. Only what this
    thread traces is affected.
    """
    thread = threading.get_ident()
    with _changing:
        _wanting_rules.append(thread)
        _source_info_util.current = _current_of_rules
    try:
        yield
    finally:
        with _changing:
            _wanting_rules.remove(thread)
            if not _wanting_rules:
                _source_info_util.current = _current


def _current_of_rules() -> Any:
    info = _current()
    if threading.get_ident() not in _wanting_rules:
        return info
    fresh = _Traceback.get_traceback()
    for code in fresh.raw_frames()[0]:
        if code.co_name.startswith(("backward_pass", "eval_jaxpr")):
            break
        if _source_info_util.is_user_filename(code.co_filename):
            return info.replace(traceback=fresh)
    return info


def user_line(source_info: Any) -> str:
    """``file:line (function)`` of the user's frame that made an equation, as JAX prints it."""
    return _source_info_util.summarize(source_info)


def user_functions(source_info: Any) -> tuple[str, ...]:
    """Names of the user's functions on the call stack of an equation, innermost first."""
    return tuple(f.function_name for f in _source_info_util.user_frames(source_info.traceback))


def user_frames(source_info: Any) -> tuple[tuple[str, int, str], ...]:
    """File, line and function of the user's frames that made an equation, innermost first."""
    frames = _source_info_util.user_frames(source_info.traceback)
    return tuple((f.file_name, f.start_line, f.function_name) for f in frames)


def hide_frames(directory: str) -> None:
    """Leaves the files of ``directory`` out of tracebacks and of equations' source lines."""
    _traceback_util.register_exclusion(directory)
    _source_info_util.register_exclusion(directory)


def leave_out_frames(error: Exception, count: int) -> None:
    """Take the outermost frames, from the one that handles an error on, out of its traceback."""
    for _ in range(count):
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next
