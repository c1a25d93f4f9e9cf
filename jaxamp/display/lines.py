"""Lines of a first screen: they fit it, with or without rich."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

MOST = 30  # lines of a first screen

Part = str | tuple[str, str]
Line = tuple[Part, ...]
"""Parts of a line; one with a style is a pair, as for rich."""


def plain(line: Line) -> str:
    """Return a line without styles.

    >>> plain(("a ", ("b", "bold"), " "))
    'a b'
    """
    return "".join(part if isinstance(part, str) else part[0] for part in line).rstrip()


def cut(line: Line, width: int) -> Line:
    """Return what fits of a line, which ends in a mark where something is left out.

    >>> cut(("abc", ("def", "bold")), 5)
    ('abc', ('d…', 'bold'))
    """
    if len(plain(line)) <= width:
        return line
    kept: list[Part] = []
    left = width - 1
    for part in line:
        text, *style = (part,) if isinstance(part, str) else part
        short = text[:left] + "…" * (len(text) > left)
        kept.append((short, style[0]) if style else short)
        left -= len(text)
        if left < 0:
            break
    return tuple(kept)


def sentence(words: str, style: str = "", *, width: int = 116) -> Iterator[Line]:
    """Yield the lines of a sentence; all but the first are indented."""
    for text in textwrap.wrap(words, width, subsequent_indent="    ", break_on_hyphens=False):
        yield ((text, style),) if style else (text,)


def table(rows: Iterable[Sequence[Part]], right: Sequence[int] = ()) -> Iterator[Line]:
    """Yield rows with their columns one below the other.

    Args:
      rows: of as many cells each.
      right: indices of the columns that end, rather than begin, one below the other.
    """
    rows = list(rows)
    widths = [max(len(plain((cell,))) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        line: list[Part] = ["  "]
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            blank = " " * (width - len(plain((cell,))))
            line += [blank, cell] if index in right else [cell, blank]
            line.append("  ")
        yield tuple(line)
