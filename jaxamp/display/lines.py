"""Lines of a first screen, which fit it with or without rich, and numbers for people."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from jaxamp.inspect.operation import Place, cell


def amount(number: float, unit: str = "") -> str:
    """Write a number with three digits and a letter for its thousands.

    >>> amount(52428800, "FLOP"), amount(1500), amount(0)
    ('52.4 MFLOP', '1.5 k', '0')
    """
    letters = ["", "k", "M", "G", "T", "P"]
    size = float(number)
    while abs(size) >= 999.5 and len(letters) > 1:
        size, letters = size / 1000, letters[1:]
    digits = f"{size:.0f}" if size == int(size) or abs(size) >= 99.95 else f"{size:.3g}"
    return f"{digits} {letters[0]}{unit}".strip()


def storage(number: float) -> str:
    """Write a number of bytes.

    >>> storage(3 * 2**20), storage(100)
    ('3.0 MiB', '100 B')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(number) >= 1024 and len(units) > 1:
        number, units = number / 1024, units[1:]
    return f"{number:.{0 if units[0] == 'B' else 1}f} {units[0]}"


def share(part: float, whole: float) -> str:
    """Write a part of a whole in per cent; nothing of nothing is a dash.

    >>> share(1, 8), share(0, 0)
    ('12.5 %', '–')
    """
    return f"{100 * part / whole:.1f} %" if whole else "–"


def near(place: Place, lacking: str = "") -> str:
    """Write a line of source, its file as `near_file` does; `lacking` where it is not known."""
    return f"{near_file(place.file)}:{place.line}" if place.file else lacking


def near_file(path: str) -> str:
    """Write a path as seen from here, where that is shorter, or the name of a notebook's cell."""
    if not os.path.isabs(path):
        return path
    return cell(path) or min(path, os.path.relpath(path), key=len)


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
    """Yield rows with their columns one below the other; those of `right` end so."""
    rows = list(rows)
    widths = [max(len(plain((cell,))) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        line: list[Part] = ["  "]
        for index, (part, width) in enumerate(zip(row, widths, strict=True)):
            blank = " " * (width - len(plain((part,))))
            line += [blank, part] if index in right else [part, blank]
            line.append("  ")
        yield tuple(line)
