"""Find the call expression in the source that a frame of a call stack is at."""

from __future__ import annotations

import ast
import functools
import linecache
from types import CodeType

Span = tuple[int | None, ...]  # first and last line, first and last column


def call_at(code: CodeType, at: int) -> ast.Call | None:
    """Return the call that a code object is at; ``None`` where the source is not known."""
    return _calls_of(code.co_filename).get(_span(code, at))


@functools.lru_cache(maxsize=256)
def tree_of(file: str) -> ast.AST:
    """Parse a file; nothing is in it where it cannot be read, or Python alone cannot parse it."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a notebook cell, say
        return ast.Module([], [])


@functools.lru_cache(maxsize=256)
def _calls_of(file: str) -> dict[Span, ast.Call]:
    nodes = (node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call))
    return {(n.lineno, n.end_lineno, n.col_offset, n.end_col_offset): n for n in nodes}


@functools.lru_cache(maxsize=16384)
def _span(code: CodeType, at: int) -> Span:
    return [*code.co_positions()][at // 2]  # an instruction is two bytes
