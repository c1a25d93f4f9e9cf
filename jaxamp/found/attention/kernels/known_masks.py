"""Masks known when a program is traced, as numbers of each query and of each key.

A mask of 8,192 words is 64 MiB; these numbers are 64 KiB, and a program has them in each layer.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, fields
from typing import Any, Self

import jax.numpy as jnp
import numpy as np


class _ByContent:
    """Arrays whose bytes tell them apart: equal masks are one key of a cache."""

    @functools.cached_property
    def _bytes(self) -> bytes:
        values = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return b"".join(np.asarray(x).tobytes() for x in values)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._bytes == other._bytes  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self._bytes)

    def __repr__(self) -> str:
        queries, keys = self.shape  # type: ignore[attr-defined]
        return f"{type(self).__name__}({queries}x{keys}, {zlib.crc32(self._bytes):08x})"


@dataclass(frozen=True, eq=False, repr=False)
class Intervals(_ByContent):
    """A query sees the keys from one on, up to another.

    So are segments one after the other, prefixes that all see, windows to both sides, and queries
    that are the last words.

    >>> mask = Intervals.of(np.kron(np.eye(2), np.ones((3, 3))) > 0)
    >>> mask.start, mask.segments
    (array([0, 0, 0, 3, 3, 3], dtype=int32), (3, 3))
    """

    start: np.ndarray  # the first key of each query, int32[T]
    stop: np.ndarray  # the key after its last one, int32[T]
    keys: int  # how many there are

    @classmethod
    def of(cls, seen: np.ndarray) -> Self | None:
        """Return the first and the last key of each row, unless there are gaps between."""
        keys = seen.shape[1]
        start, stop = seen.argmax(axis=1), keys - seen[:, ::-1].argmax(axis=1)
        if (np.count_nonzero(seen, axis=1) != stop - start).any():
            return None
        return cls(start.astype("i4"), stop.astype("i4"), keys)

    @property
    def shape(self) -> tuple[int, int]:
        """Return how many queries and keys it is of."""
        return len(self.start), self.keys

    def seen(self, numpy: Any = jnp) -> Any:
        """Return bool[T, S]."""
        keys = numpy.arange(self.keys)
        start, stop = (numpy.asarray(x)[:, None] for x in (self.start, self.stop))
        return (keys >= start) & (keys < stop)

    @functools.cached_property
    def segments(self) -> tuple[int, int] | None:
        """Return the queries and keys of a segment, if all have as many, one after the other."""
        keys = int(self.stop[0] - self.start[0])
        first = np.arange(0, self.keys, keys)
        queries = len(self.start) // len(first)
        alike = np.array_equal(self.start, np.repeat(first, queries))
        return (queries, keys) if alike and (self.stop == self.start + keys).all() else None


@dataclass(frozen=True, eq=False, repr=False)
class Segments(_ByContent):
    """A query sees the keys that have its own number, wherever they are."""

    queries: np.ndarray  # numbers of the queries, int32[T], in the order in which they come first
    keys: np.ndarray  # numbers of the keys, int32[S]; -1 for those that no query sees

    @classmethod
    def of(cls, seen: np.ndarray) -> Self | None:
        """Return one number for equal rows, unless others share a key with them."""
        numbers: dict[bytes, int] = {}
        packed = np.packbits(seen, axis=1)
        queries = np.array([numbers.setdefault(x.tobytes(), len(numbers)) for x in packed], "i4")
        rows = seen[np.unique(queries, return_index=True)[1]]
        if (np.count_nonzero(rows, axis=0) > 1).any():
            return None
        keys = np.where(rows.any(axis=0), rows.argmax(axis=0), -1).astype("i4")
        return cls(queries, queries if np.array_equal(queries, keys) else keys)  # one constant

    @property
    def shape(self) -> tuple[int, int]:
        """Return how many queries and keys it is of."""
        return len(self.queries), len(self.keys)

    def seen(self, numpy: Any = jnp) -> Any:
        """Return bool[T, S]."""
        return numpy.asarray(self.queries)[:, None] == numpy.asarray(self.keys)


KnownMask = Intervals | Segments
"""A mask of all examples and heads."""


def known_mask(seen: np.ndarray) -> KnownMask | None:
    """Return a mask bool[T, S] in such numbers; ``None`` where it is of neither kind."""
    return Intervals.of(seen) or Segments.of(seen)
