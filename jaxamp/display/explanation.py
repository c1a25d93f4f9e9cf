"""Show annotated source at a terminal: functions of the user's own that hold given lines."""

from __future__ import annotations

import ast
import itertools
import linecache
from collections.abc import Iterator

from jaxamp.display.lines import MOST, Line, Part, near_file
from jaxamp.display.summary import COLORS
from jaxamp.inspect.explain import Explanation, Note
from jaxamp.inspect.operation import grouped
from jaxamp.jaxprs.call_sites import tree_of

Span = tuple[int, int, str]
"""First line, last line and name of a function."""


def _functions(tree: ast.AST, around: str = "") -> Iterator[Span]:
    """Yield every function of a file."""
    for node in ast.iter_child_nodes(tree):
        inside = around
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inside = f"{around}{node.name}."
            if not isinstance(node, ast.ClassDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                yield first, node.end_lineno or node.lineno, around + node.name
        yield from _functions(node, inside)


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
        if not file:  # operations of JAX's own
            for note in of_file:
                yield ((f"no line: {note.arithmetic} {note.what}: {note.reason}", "dim"),)
        else:
            yield from _of_file(file, by_line, whole)
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


def _of_file(file: str, by_line: dict[int, list[Note]], whole: bool) -> Iterator[Line]:
    """Show lines with their notes by the outermost functions that hold them, or these whole.

    Code without source, typed in or made by ``exec``, has the notes alone.
    """
    spans, has_source = list(_functions(tree_of(file))), bool(linecache.getlines(file))

    def around(number: int) -> Span | None:
        return min((s for s in spans if s[0] <= number <= s[1]), default=None)

    for span, group in itertools.groupby(sorted(by_line), around):
        name = f" ({span[2]})" if span else "" if has_source else " (source not available)"
        yield ()
        yield ((f"{near_file(file)}{name}", "bold"),)
        for number in range(span[0], span[1] + 1) if whole and span else group:
            line, notes = linecache.getline(file, number).rstrip("\n"), by_line.get(number, [])
            before: Line = ((f"{number:5} │ ", "dim"),)
            if has_source:
                yield *before, (line, "" if notes else "dim")
                before = ("      │ ", "dim"), " " * (len(line) - len(line.lstrip()) + 4)
            for note in notes:
                yield from _words(note, whole, *before)


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
