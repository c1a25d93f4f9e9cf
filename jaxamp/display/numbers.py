"""Format numbers for people."""

from __future__ import annotations

import os

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
