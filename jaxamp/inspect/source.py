"""Read the user's own source: functions that hold given lines."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Spans = list[tuple[int, int, str]]
_AROUND = 1  # lines shown before and after one that is in no function


class Excerpt(NamedTuple):
    """Lines of a file that are shown together."""

    file: str
    name: str
    first: int
    lines: tuple[str, ...]

    def numbers(self) -> range:
        """Return the numbers of its lines."""
        return range(self.first, self.first + len(self.lines))


def excerpts(file: str, wanted: Iterable[int]) -> list[Excerpt]:
    """Return the functions of a file that hold the wanted lines, and lines around the others."""
    text = [line.rstrip("\n") for line in linecache.getlines(file)]
    if not text:
        return []
    spans = _functions(text)
    shown: dict[tuple[int, int], str] = {}
    for number in sorted(set(wanted)):
        around = [s for s in spans if s[0] <= number <= s[1]]
        # The outermost function is shown whole, so that a line never comes twice.
        first, last, name = min(around) if around else _alone(number, len(text), spans)
        before = max((b for _, b in shown), default=0)
        if number > before:
            shown[max(first, before + 1), last] = name
    ordered = sorted(shown.items())
    return [Excerpt(file, name, a, tuple(text[a - 1 : b])) for (a, b), name in ordered]


def _alone(number: int, length: int, spans: Spans) -> tuple[int, int, str]:
    """Return a line that is in no function, and the lines around that are in none either."""
    near = range(max(1, number - _AROUND), min(length, number + _AROUND) + 1)
    alone = [n for n in near if not any(a <= n <= b for a, b, _ in spans)]
    return alone[0], alone[-1], ""


def _functions(text: Sequence[str]) -> Spans:
    """Return the first line, last line and name of every function."""
    try:
        tree = ast.parse("\n".join(text))
    except SyntaxError:  # a notebook cell may hold what Python alone does not read
        return []
    return list(_named(tree, ""))


def _named(tree: ast.AST, around: str) -> Iterator[tuple[int, int, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield _first(node), node.end_lineno or node.lineno, around + node.name
        is_named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _named(node, f"{around}{node.name}." if is_named else around)


def _first(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])
