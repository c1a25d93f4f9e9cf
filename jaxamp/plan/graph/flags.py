"""Several boolean properties of each value, as the bits of one byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache


def union(bits: Sequence[int], values: Iterable[int]) -> int:
    """Return the flags that any of some values has.

    >>> union(bytes([1, 4, 2]), (0, 2))
    3
    """
    found = 0
    for value in values:
        found |= bits[value]
    return found


def column(bits: bytearray, flag: int) -> bytes:
    """Return one byte per value: 1 if it has a flag and else 0.

    >>> list(column(bytearray([1, 4, 6]), 4))
    [0, 1, 1]
    """
    return bytes(bits).translate(_table(flag))


@cache
def _table(flag: int) -> bytes:
    return bytes(byte & flag != 0 for byte in range(256))
