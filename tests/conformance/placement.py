"""Where plans store narrow values, beside a painting and a minimum cut."""

from __future__ import annotations

from hypothesis import Phase, given, seed, settings

from tests import random_programs
from tests.conformance.jobs import Job
from tests.placement.checks import POLICIES, check_case, check_random
from tests.placement.corpus import CASES
from tests.random_programs import DRAWN

LOTS, LOT = 100, 10


def all_jobs() -> list[Job]:
    """A job for each case of the corpus and policy, and for each lot of random programs."""
    cases = [f"{name}-{transform}-{policy}" for name, transform in CASES for policy in POLICIES]
    lots = [f"seed-{i}-{LOT}_random_programs" for i in range(LOTS)]
    return [Job("placement", name) for name in (*cases, *lots)]


def run(name: str) -> None:
    """Checks a case or a lot; the error of a lot holds a program that fails.

    Raises:
        AssertionError: if a plan stores more than it should.
    """
    first, second, third = name.split("-")
    if first == "seed":
        _run_lot(int(second))
    else:
        check_case(first, second, third)


def _run_lot(number: int) -> None:
    @seed(number)
    # To shrink what fails takes longer than a job may.
    @settings(DRAWN, max_examples=LOT, phases=[Phase.generate])
    @given(random_programs.programs())
    def check(steps: random_programs.Steps) -> None:
        check_random(steps, POLICIES[number % len(POLICIES)])

    check()
