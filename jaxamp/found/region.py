"""Regions that become something else: the values that they make, and how these are made.

A kind of region implements these three, and needs nothing else of the search and of emission. What
one that crosses no loops does not need has a body here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from jax.extend.core import JaxprEqn

from jaxamp.core.features import Outcome
from jaxamp.found.levels import Level
from jaxamp.jaxprs.known_arrays import KnownArrays


class Emission(Protocol):
    """Emission of one region; whatever it is asked for is emitted once."""

    # Arrays of the forward pass that the backward pass reads; may be set to those of one that was
    # emitted before.
    forward: list[Any]

    def value(self, value: int) -> Any:
        """Return one of the values that the region makes."""
        ...


class Region(Protocol):
    """A region that was found."""

    outcome: Outcome  # what reports say of it

    @property
    def made(self) -> frozenset[int]:
        """The values of the program that it makes."""
        ...

    @property
    def needed(self) -> frozenset[int]:
        """The values of the program that it reads."""
        ...

    @property
    def handed(self) -> int:
        """The number of arrays of `Emission.forward`."""
        return 0

    def follows(self, value: int, *, operands: bool) -> bool:
        """Return whether it can make a value where its backward pass is, without the forward pass.

        `operands` says whether what the region reads is at hand there.
        """
        return operands

    def emission(self, read: Callable[[int], Any], wanted: set[int]) -> Emission:
        """Return what emits it, given what reads values of the program, and those that are read."""
        ...


class Kind(Protocol):
    """Regions of one kind under one policy."""

    # Whether a region may have its forward pass in one loop and its backward pass in the next, see
    # `found.pairs`.
    crosses: bool
    parts: frozenset[str]  # the words of equations without which a jaxpr holds no such region

    def word(self, eqn: JaxprEqn) -> str:
        """Return the word of an equation, one of `parts` if it may be such."""
        ...

    def find(self, level: Level, known: KnownArrays) -> tuple[list[Any], list[Outcome]]:
        """Return the regions of a level, and what looks like one and is not replaced."""
        ...
