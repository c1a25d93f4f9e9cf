"""Random programs in lots, each lot with a seed of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import given, seed, settings

from tests.conformance.jobs import Job
from tests.random_programs import DRAWN


class Lots(NamedTuple):
    """Lots of random programs of one sort.

    Attributes:
      kind: of their jobs.
      size: programs of a lot.
      programs: returns the strategy that draws one.
      check: raises `AssertionError` for one that is wrong.
    """

    kind: str
    size: int
    programs: Callable[[], Any]
    check: Callable[[Any], None]

    def all_jobs(self, count: int) -> list[Job]:
        """Jobs that draw `count` programs together (rounded up to whole lots)."""
        lots = range(-(-count // self.size))
        return [Job(self.kind, f"seed-{i}-of-{self.size}-programs") for i in lots]

    def run(self, name: str) -> None:
        """Checks a lot; the error holds the smallest program that fails.

        Raises:
            AssertionError: if one is wrong.
        """

        @seed(int(name.split("-")[1]))
        @settings(DRAWN, max_examples=self.size)
        @given(self.programs())
        def check(drawn: Any) -> None:
            self.check(drawn)

        check()
