"""Random programs in lots, each lot with a seed of its own."""

from __future__ import annotations

from hypothesis import given, seed, settings

from tests import random_programs
from tests.conformance.jobs import Job
from tests.random_programs import DRAWN

LOT = 10


def all_jobs(count: int) -> list[Job]:
    """Jobs that draw `count` programs together (rounded up to whole lots)."""
    return [Job("random", f"seed-{i}-of-{LOT}-programs") for i in range(-(-count // LOT))]


def run(name: str) -> None:
    """Checks a lot; the error holds the smallest program that fails.

    Raises:
        AssertionError: if amp breaks an invariant.
    """

    @seed(int(name.split("-")[1]))
    @settings(DRAWN, max_examples=LOT)
    @given(random_programs.programs())
    def check(steps: random_programs.Steps) -> None:
        random_programs.check(steps)

    check()
