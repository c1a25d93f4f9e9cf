"""A program's plan beside the painting and the cheapest labelling there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxamp import plan_of
from tests.placement.cost import cost, stored_bytes
from tests.placement.cut import cut
from tests.placement.extract import placing
from tests.placement.labels import planned
from tests.placement.painting import painted
from tests.placement.problem import Labels, Problem
from tests.placement.program import unfolded


@dataclass(frozen=True)
class Comparison:
    """Labellings of one problem.

    Attributes:
      problem: what was to be labelled.
      planned: how the plan does it.
      painted: how the painting does it.
      best: a cheapest one.
      gainful: a cheapest one, if the guard against rewriting for little gain is kept to.
      guarded: how the painting does it if it keeps to that guard too.
    """

    problem: Problem
    planned: Labels
    painted: Labels
    best: Labels
    gainful: Labels
    guarded: Labels

    def bytes(self, labels: Labels) -> int:
        """What a labelling stores."""
        return stored_bytes(self.problem, labels)

    @property
    def excess(self) -> float:
        """What the plan stores, over what the cheapest labelling does."""
        return self.bytes(self.planned) / max(self.bytes(self.best), 1)

    def check(self) -> None:
        """Holds the labellings to what is pinned, and the plan to the painting.

        Raises:
            AssertionError: if one of them cheats, or the plan stores more.
        """
        self._check_pins()
        planned, painted, best = map(self.bytes, (self.planned, self.painted, self.best))
        assert planned <= painted, f"{planned} bytes, {painted} painted, {best} at best"

    def check_guarded(self, slack: float) -> None:
        """The same where everybody keeps to the guard against rewriting for little gain.

        Args:
            slack: how many times of what is possible a plan may store.

        Raises:
            AssertionError: if one of them cheats, or the plan stores more.
        """
        self._check_pins()
        planned, painted, best = map(self.bytes, (self.planned, self.guarded, self.gainful))
        figures = f"{planned} bytes, {painted} painted, {best} at best"
        assert planned <= min(painted, slack * best), figures

    def _check_pins(self) -> None:
        for labels in (self.best, self.painted, self.gainful, self.guarded):
            assert self.problem.allows(labels)
        assert self.problem.allows(self.planned), "the plan narrows what has to be wide"
        assert cost(self.problem, self.best) <= cost(self.problem, self.planned)


def compare(fn: Callable[..., Any], args: Sequence[Any], policy: Any) -> Comparison:
    """Plans a function and labels the same program otherwise."""
    program = unfolded(plan_of(fn, policy)(*args))
    place = placing(program)
    problem = place.problem
    return Comparison(
        problem=problem,
        planned=planned(program, place),
        painted=painted(program, place, problem),
        best=cut(problem),
        gainful=cut(place.gainful),
        guarded=painted(program, place, place.gainful),
    )
