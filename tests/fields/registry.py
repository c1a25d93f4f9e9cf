"""Programs of many fields, as researchers write them, and the one list that all of them join.

They were written before anybody looked at what fails: with the scales, constants and auxiliary
outputs that such programs have, and with no regard for how a planner works.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.programs.registry import Args, Draw, enter

Layers = list[tuple[Any, Any]]


class FieldDraw(Draw):
    """Arguments of a program of a field; the stream depends on its name alone."""

    def layers(self, *widths: int, scale: float = 1.0) -> Layers:
        """Weights and biases of dense layers, from the first width to the last."""
        return [
            (scale * self.weight(i, o), self.normal(o, scale=0.1))
            for i, o in itertools.pairwise(widths)
        ]

    def kernel(self, size: int, inputs: int, outputs: int, dims: int = 2) -> np.ndarray:
        """A convolution's kernel, spatial dimensions first."""
        return self.normal(*[size] * dims, inputs, outputs, scale=(size**dims * inputs) ** -0.5)

    def times(self, *shape: int, start: float = 0.0, step: float = 1.0) -> np.ndarray:
        """Increasing time stamps along the last axis, irregular."""
        return (start + np.cumsum(self.uniform(*shape, low=0.5, high=1.5) * step, -1)).astype("f")


@dataclasses.dataclass(frozen=True)
class FieldProgram:
    """A float32 program with its arguments.

    Attributes:
        name: the function's name, unique.
        field: the file that it is in.
        fn: the program; its first argument is what it is differentiated by.
        args: positional arguments, numpy arrays or trees of them.
        forward: whether it is run without a derivative.
        aux: whether it returns auxiliary outputs beside the value that is differentiated.
    """

    name: str
    field: str
    fn: Callable[..., Any]
    args: Args
    forward: bool
    aux: bool

    def __str__(self) -> str:
        return f"{self.field}.{self.name}"


FIELD_PROGRAMS: dict[str, FieldProgram] = {}


def program(
    args: Callable[[FieldDraw], Args], *, forward: bool = False, aux: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the decorated function into `FIELD_PROGRAMS`.

    Args:
        args: makes the arguments from a `FieldDraw`.
        forward: see `FieldProgram`.
        aux: see `FieldProgram`.

    Raises:
        ValueError: if two programs have one name.
    """

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        name, field = fn.__name__, fn.__module__.rpartition(".")[2]
        drawn = args(FieldDraw(f"{field}.{name}"))
        enter(FIELD_PROGRAMS, name, FieldProgram(name, field, fn, drawn, forward, aux))
        return fn

    return decorate
