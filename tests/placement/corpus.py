"""The programs on which placements are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from tests import random_programs
from tests.placement.compare import Comparison, compare
from tests.products import REFUSALS
from tests.programs import PROGRAMS
from tests.random_programs import Steps
from tests.transforms import TRANSFORMS

PLAIN, GRADIENT = "plain", "amp_of_grad"
"""A program as it is, and its gradient taken inside of `amp`."""

CASES = [
    (name, transform)
    for name in PROGRAMS
    for transform in (PLAIN, GRADIENT)
    if transform not in REFUSALS.get(name, ())
]


def compared(name: str, transform: str, policy: str) -> Comparison:
    """The comparison for a program of the corpus under a transform."""
    program = PROGRAMS[name]
    fn, args = TRANSFORMS[transform].build(lambda fn: fn, program.fn, program.args)
    return compare(fn, args, policy)


def compared_at_random(steps: Steps, policy: str) -> Iterator[Comparison]:
    """The comparison for a random program, and for its gradient if it has one."""
    fn, args = random_programs.program(steps), random_programs.arguments()

    def loss(*args: Any) -> Any:
        return fn(*args)["loss"]

    functions: list[Callable[..., Any]] = [fn]
    if random_programs.differentiable(fn, args):
        functions.append(jax.grad(loss, argnums=(0, 1)))
    for function in functions:
        yield compare(function, args, policy)
