"""What a public program is, where `amp` may stand in it, and the one list that all of them join."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxamp import amp

Wrapper = Callable[..., Any]
PLACES = ("model", "loss", "step", "jit")
"""Around the model's call; around the loss; around the step, under its jit; around that jit."""


@dataclass(frozen=True)
class Places:
    """A program's hooks, one for each natural place of `amp`; at most one of them does something.

    Attributes:
      chosen: one of `PLACES`, or ``""`` for the float32 program.
    """

    chosen: str = ""

    def model(self, fn: Any) -> Any:
        """Mark what computes the network, a function or a method."""
        return amp(fn) if self.chosen == "model" else fn

    def loss(self, fn: Any) -> Any:
        """Mark what is differentiated."""
        return amp(fn) if self.chosen == "loss" else fn

    def step(self, fn: Any, jit: Wrapper = jax.jit, **options: Any) -> Any:
        """Compile a train step by ``jax.jit`` or a library's own, as the program does."""
        step = jit(amp(fn) if self.chosen == "step" else fn, **options)
        return amp(step) if self.chosen == "jit" else step


Losses = list[Any]


@dataclass(frozen=True)
class PublicProgram:
    """A training program that returns the loss of each of its steps.

    Attributes:
      name: the function's name.
      train: takes the `Places`, and the library's own ``dtype`` of computation where it has one.
      has_dtype: whether it has.
      kept: places in which what is marked decides when a loop stops, so that all of it is float32.
    """

    name: str
    train: Callable[..., Losses]
    has_dtype: bool
    kept: frozenset[str]

    def losses(self, place: str = "", dtype: Any = None) -> np.ndarray:
        """Train, and return the losses, f32[steps]."""
        options = {"dtype": dtype} if self.has_dtype else {}
        return np.array([float(x) for x in self.train(Places(place), **options)], np.float32)


PUBLIC: dict[str, PublicProgram] = {}


def public(*, dtype: bool = False, kept: str = "") -> Callable[[Any], Any]:
    """Register a program; refuse a second of one name.

    Args:
      dtype: whether it takes the library's own dtype of computation.
      kept: places in which it is float32, separated by spaces.
    """

    def register(train: Any) -> Any:
        name = train.__name__
        if name in PUBLIC:
            raise ValueError(f"{name!r} is a program already")
        PUBLIC[name] = PublicProgram(name, train, dtype, frozenset(kept.split()))
        return train

    return register
