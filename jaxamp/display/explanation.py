"""The annotated source at a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.text import Text

from jaxamp.display.numbers import near
from jaxamp.display.terminal import precision_text
from jaxamp.inspect.explain import Explanation, Note
from jaxamp.inspect.source import Excerpt, excerpts


def show_explanation(explanation: Explanation) -> Group:
    """Show every function that has notes, line by line."""
    return Group(*_parts(explanation))


def _parts(explanation: Explanation) -> Iterator[Any]:
    inside = f", inside {explanation.where}" if explanation.where else ""
    yield Text.assemble((explanation.program, "bold"), f" under {explanation.policy}{inside}")
    by_file: dict[str, dict[int, list[Note]]] = defaultdict(lambda: defaultdict(list))
    for note in explanation.notes:
        by_file[note.place.file][note.place.line].append(note)
    for file, by_line in by_file.items():
        found = excerpts(file, by_line) if file else []
        for block in found:
            yield from _block(block, by_line)
        if not found:
            yield from _sourceless(file, by_line) if file else _homeless(by_line)


def _block(block: Excerpt, by_line: dict[int, list[Note]]) -> Iterator[Text]:
    name = f" ({block.name})" if block.name else ""
    yield Text(f"\n{near(block.file)}{name}", style="bold")
    for number, line in zip(block.numbers(), block.lines, strict=True):
        notes = by_line.get(number, [])
        yield Text.assemble((f"{number:5} │ ", "dim"), (line, "" if notes else "dim"))
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        for note in notes:
            yield Text.assemble(("      │ ", "dim"), indent, *_words(note))


def _sourceless(file: str, by_line: dict[int, list[Note]]) -> Iterator[Text]:
    """Show the notes of code that was typed in, or is made by ``exec``."""
    yield Text(f"\n{near(file)} (source not available)", style="bold")
    for number, notes in by_line.items():
        for note in notes:
            yield Text.assemble((f"{number:5} │ ", "dim"), *_words(note))


def _words(note: Note) -> Iterator[Text]:
    direction = " (fwd, bwd)" if note.backward else ""
    guard = f" [{note.guard}]" if note.guard else ""
    yield precision_text(f"{note.arithmetic:<4}")
    yield Text(f" {note.what}{direction}")
    yield Text(f" — {note.reason}{guard}", style="italic")


def _homeless(by_line: dict[int, list[Note]]) -> Iterator[Text]:
    """Show operations that JAX made without a line of the user's."""
    for notes in by_line.values():
        for note in notes:
            yield Text(f"no line: {note.arithmetic} {note.what}: {note.reason}", style="dim")
