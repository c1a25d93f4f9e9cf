"""What a test program is, and the one list that all of them join."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import zlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

Args = tuple[Any, ...]
_Entry = TypeVar("_Entry")


def enter_modules(package: str, path: Iterable[str]) -> None:
    """Import all modules of a package, whose programs then enter themselves."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


def enter(table: dict[str, _Entry], name: str, entry: _Entry) -> None:
    """Put a program into a list.

    Raises:
        ValueError: if two programs have one name.
    """
    if name in table:
        raise ValueError(f"two test programs are called {name}")
    table[name] = entry


class Draw:
    """Deterministic numpy arguments: the stream depends on the program's name alone."""

    def __init__(self, name: str) -> None:
        self._rng = np.random.default_rng(zlib.crc32(name.encode()))

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        """Standard normal values times `scale`, float32."""
        return (scale * self._rng.standard_normal(shape)).astype(np.float32)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> np.ndarray:
        """Uniform values between `low` and `high`, float32."""
        return self._rng.uniform(low, high, shape).astype(np.float32)

    def weight(self, rows: int, cols: int) -> np.ndarray:
        """A matrix that keeps the size of what it multiplies, float32."""
        return self.normal(rows, cols, scale=rows**-0.5)

    def integers(self, high: int, *shape: int) -> np.ndarray:
        """Integers from 0 to `high` (excluded), int32."""
        return self._rng.integers(0, high, shape).astype(np.int32)

    def mask(self, *shape: int) -> np.ndarray:
        """Booleans, about three of four true."""
        return self._rng.uniform(size=shape) < 0.75

    def positive_definite(self, size: int) -> np.ndarray:
        """A well-conditioned symmetric positive definite matrix, float32."""
        factor = self.normal(size, size, scale=size**-0.5)
        return (factor @ factor.T + 2 * np.eye(size)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Program:
    """A small float32 JAX program with its arguments and what is expected of it.

    Attributes:
        name: the function's name, unique.
        fn: the program, a pure function of `args`.
        args: positional arguments; numpy arrays, Python scalars, or trees of them.
        family: the file that it is in.
        tags: `compute` (every dot and conv must run low), `explicit` (the user asked for
            some float32 product), `effects`, `devices`, `callback`.
        tolerance: a row of `tests.tolerances.CLASSES`.
        low_dots: how many dot and conv equations of `amp(fn)` have low operands under a low
            preset, counted recursively in the jaxpr; None where it is not clear.
    """

    name: str
    fn: Callable[..., Any]
    args: Args
    family: str
    tags: frozenset[str]
    tolerance: str
    low_dots: int | None


PROGRAMS: dict[str, Program] = {}


def program(
    args: Callable[[Draw], Args],
    *,
    low_dots: int | None = None,
    tags: str = "",
    tolerance: str = "dot",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the decorated function into `PROGRAMS`.

    Args:
        args: makes the arguments from a `Draw`.
        low_dots: see `Program`. A positive number tags the program `compute`, if not `explicit`.
        tags: words, separated by spaces.
        tolerance: see `Program`.

    Raises:
        ValueError: if two programs have one name.
    """

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        name, family = fn.__name__, fn.__module__.rpartition(".")[2]
        words = frozenset(tags.split())
        if low_dots and "explicit" not in words:
            words |= {"compute"}
        entry = Program(name, fn, args(Draw(name)), family, words, tolerance, low_dots)
        enter(PROGRAMS, name, entry)
        return fn

    return decorate
