"""Random programs with large offsets in lots, each lot with a seed of its own."""

from __future__ import annotations

from hypothesis import given, seed, settings

from tests.conformance.jobs import Job
from tests.fields import random
from tests.random_programs import DRAWN

LOT = 20


def all_jobs(count: int) -> list[Job]:
    """Jobs that draw `count` programs together (rounded up to whole lots)."""
    return [Job("offsets", f"seed-{i}-of-{LOT}-programs") for i in range(-(-count // LOT))]


def run(name: str) -> None:
    """Checks a lot; the error holds the smallest program that fails.

    Raises:
        AssertionError: if amp loses more than rounding the products costs.
    """

    @seed(int(name.split("-")[1]))
    @settings(DRAWN, max_examples=LOT)
    @given(random.programs())
    def check(drawn: random.Drawn) -> None:
        random.check(drawn)

    check()
