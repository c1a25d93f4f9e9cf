"""What the tier runs: networks to train and problems to solve, each by its name."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Trained:
    """A network and its loss.

    Attributes:
      loss: of the parameters and a batch, a scalar.
      params: where training starts; float32.
      batch: a tree of arrays.
      tolerance: a row of `tests.tolerances.CLASSES`.
      rate: learning rate of Adam for a short run that learns.
    """

    loss: Callable[[Any, Any], Any]
    params: Any
    batch: Any
    tolerance: str = "deep"
    rate: float = 1e-2


@dataclasses.dataclass(frozen=True)
class Solved:
    """Something that is asked for an accuracy.

    Attributes:
      solve: of arrays, a tree of arrays.
      args: its arguments.
      check: raises AssertionError if results miss the accuracy that was asked for.
      same: whether there is nothing to gain, so that the program must stay the float32 one.
    """

    solve: Callable[..., Any]
    args: tuple[Any, ...]
    check: Callable[[Any], None]
    same: bool


Make = Callable[[], Trained | Solved]
MODELS: dict[str, tuple[tuple[str, ...], Make]] = {}


def model(name: str, *packages: str) -> Callable[[Make], Make]:
    """Enters a function that makes a model; `packages` are what it imports."""

    def enter(make: Make) -> Make:
        if name in MODELS:
            raise ValueError(f"there is a model {name!r} already")
        MODELS[name] = packages, make
        return make

    return enter


def missing(name: str) -> list[str]:
    """The packages of a model that are not installed."""
    return [p for p in MODELS[name][0] if importlib.util.find_spec(p) is None]


def build(name: str) -> Trained | Solved:
    """The model called `name`."""
    return MODELS[name][1]()
