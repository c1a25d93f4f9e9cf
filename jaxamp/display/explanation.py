"""Show annotated source at a terminal: functions of the user's own that hold given lines."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxamp.display.lines import MOST, Line, Part, near_file
from jaxamp.display.summary import COLORS
from jaxamp.inspect.explain import Explanation, Note
from jaxamp.inspect.operation import grouped

Spans = list[tuple[int, int, str]]
_BESIDE = 1  # lines shown before and after one that is in no function


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
    near = range(max(1, number - _BESIDE), min(length, number + _BESIDE) + 1)
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


_GLOSSARY = "Reasons and [guards] in full sentences: docs/explanation/glossary.md, guards.md."
_SEVERAL = 2  # modules: a layer and what is around it
_AROUND = 4  # lines of a first screen that are no source: heading, what is left out, the glossary


def explanation_lines(explanation: Explanation) -> Iterator[Line]:
    """Yield the lines that cost most, or with everything all lines of all functions."""
    inside = f", inside {explanation.where}" if explanation.where else ""
    yield ((explanation.program, "bold"), f" under {explanation.policy}{inside}")
    whole = explanation.everything
    notes = [n for n in explanation.notes if whole or (n.computes and n.place.file)]
    every = len({n.place for n in notes})
    if not whole:
        notes = _costliest(notes)
    for file, of_file in grouped(notes, lambda note: note.place.file).items():
        by_line = grouped(of_file, lambda note: note.place.line)
        found = excerpts(file, by_line) if file else []
        for block in found:
            yield from _block(block, by_line, whole)
        if not found:
            yield from _sourceless(file, by_line, whole) if file else _homeless(by_line)
    if not whole and explanation.notes:
        shown = len({n.place for n in notes})
        rest = f"The {shown} of {every} lines that cost most. " if shown < every else ""
        yield ()
        yield (
            (f"{rest}All, and operations without floats: .full(), everything=True, --all.", "dim"),
        )
    if notes:
        yield ((_GLOSSARY, "dim"),)


def _costliest(notes: list[Note]) -> list[Note]:
    """Return the notes of as many lines as fit the first screen, in their order."""
    flops, moved = (
        sum(costs) or 1 for costs in ([n.flops for n in notes], [n.bytes for n in notes])
    )
    by_line = grouped(notes, lambda note: (note.place.file, note.place.line))

    def cost(line: list[Note]) -> float:
        return max(max(n.flops / flops, n.bytes / moved) for n in line)

    kept: list[Note] = []
    functions: set[tuple[str, str]] = set()
    left = MOST - _AROUND
    for line in sorted(by_line.values(), key=cost, reverse=True):
        place = line[0].place
        heading = 2 * ((place.file, place.function) not in functions)
        rows = 1 + sum(1 + (len(n.modules) > _SEVERAL) for n in line) + heading
        if rows <= left:
            left -= rows
            kept += line
            functions.add((place.file, place.function))
    return [n for n in notes if n in kept]


def _block(block: Excerpt, by_line: dict[int, list[Note]], whole: bool) -> Iterator[Line]:
    name = f" ({block.name})" if block.name else ""
    yield ()
    yield ((f"{near_file(block.file)}{name}", "bold"),)
    for number, line in zip(block.numbers(), block.lines, strict=True):
        notes = by_line.get(number, [])
        if not (notes or whole):
            continue
        yield (f"{number:5} │ ", "dim"), (line, "" if notes else "dim")
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        for note in notes:
            yield from _words(note, whole, ("      │ ", "dim"), indent)


def _sourceless(file: str, by_line: dict[int, list[Note]], whole: bool) -> Iterator[Line]:
    """Show the notes of code without source, typed in or made by ``exec``."""
    yield ()
    yield ((f"{near_file(file)} (source not available)", "bold"),)
    for number, notes in by_line.items():
        for note in notes:
            yield from _words(note, whole, (f"{number:5} │ ", "dim"))


def _words(note: Note, whole: bool, *before: Part) -> Iterator[Line]:
    """Show a note, and below it the modules that it is about where these are several."""
    direction = " (fwd, bwd)" if note.backward else ""
    guard = f" [{note.guard}]" if note.guard else ""
    word = (f"{note.arithmetic:<4}", COLORS.get(note.arithmetic, "dim"))
    what = f" {note.what if whole else note.computes}{direction}"
    yield *before, word, what, (f" — {note.reason}{guard}", "italic")
    if len(note.modules) > _SEVERAL:
        rest = f", {len(note.modules) - 4} more" if len(note.modules) > 4 else ""
        modules = ", ".join(name or "(no module)" for name in note.modules[:4])
        yield *before, f"     in {modules}{rest}"


def _homeless(by_line: dict[int, list[Note]]) -> Iterator[Line]:
    """Show operations of JAX's own that have no line of the user's."""
    for notes in by_line.values():
        for note in notes:
            yield ((f"no line: {note.arithmetic} {note.what}: {note.reason}", "dim"),)
