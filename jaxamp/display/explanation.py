"""Show annotated source at a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from jaxamp.display.numbers import near
from jaxamp.display.terminal import precision_text
from jaxamp.errors import counted
from jaxamp.inspect.explain import Explanation, Note
from jaxamp.inspect.source import Excerpt, excerpts

_GLOSSARY = (
    "\nCompute is matrix products and convolutions; a fused region is what XLA computes in one "
    "kernel.\nAll words and reasons, and the [guards]: docs/explanation/glossary.md, guards.md."
)


def show_explanation(explanation: Explanation) -> Iterator[Any]:
    """Show every function that has notes, line by line."""
    inside = f", inside {explanation.where}" if explanation.where else ""
    yield Text.assemble((explanation.program, "bold"), f" under {explanation.policy}{inside}")
    whole = explanation.everything
    notes = [n for n in explanation.notes if whole or (n.computes and n.place.file)]
    by_file: dict[str, dict[int, list[Note]]] = defaultdict(lambda: defaultdict(list))
    for note in notes:
        by_file[note.place.file][note.place.line].append(note)
    for file, by_line in by_file.items():
        found = excerpts(file, by_line) if file else []
        for block in found:
            yield from _block(block, by_line, whole)
        if not found:
            yield from _sourceless(file, by_line, whole) if file else _homeless(by_line)
    if notes:
        yield Text(_GLOSSARY, style="dim")
    if hidden := len(explanation.notes) - len(notes):
        yield Text(
            f"Not shown: {counted(hidden, 'note')} on what moves data or computes no floats, and "
            "all other lines (--all, or everything=True).",
            style="dim",
        )


def _block(block: Excerpt, by_line: dict[int, list[Note]], whole: bool) -> Iterator[Text]:
    name = f" ({block.name})" if block.name else ""
    yield Text(f"\n{near(block.file)}{name}", style="bold")
    for number, line in zip(block.numbers(), block.lines, strict=True):
        notes = by_line.get(number, [])
        if not (notes or whole):
            continue
        yield Text.assemble((f"{number:5} │ ", "dim"), (line, "" if notes else "dim"))
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        for note in notes:
            yield Text.assemble(("      │ ", "dim"), indent, *_words(note, whole))


def _sourceless(file: str, by_line: dict[int, list[Note]], whole: bool) -> Iterator[Text]:
    """Show the notes of code without source, typed in or made by ``exec``."""
    yield Text(f"\n{near(file)} (source not available)", style="bold")
    for number, notes in by_line.items():
        for note in notes:
            yield Text.assemble((f"{number:5} │ ", "dim"), *_words(note, whole))


def _words(note: Note, whole: bool) -> Iterator[Text]:
    direction = " (fwd, bwd)" if note.backward else ""
    guard = f" [{note.guard}]" if note.guard else ""
    yield precision_text(f"{note.arithmetic:<4}")
    yield Text(f" {note.what if whole else note.computes}{direction}")
    yield Text(f" — {note.reason}{guard}", style="italic")


def _homeless(by_line: dict[int, list[Note]]) -> Iterator[Text]:
    """Show operations of JAX's own that have no line of the user's."""
    for notes in by_line.values():
        for note in notes:
            yield Text(f"no line: {note.arithmetic} {note.what}: {note.reason}", style="dim")
