"""The search: choose by prediction, run it, repair by bisection, improve while it pays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from jaxamp.tools.tune.sensitivity import predicted

_FEW = 14  # groups whose every choice is looked at
# Choices that bound the number of runs, not what may be chosen: each choice is run and measured.
_WORTHWHILE = 0.995  # what is not cheaper by this much is not tried
_HOPEFUL = 1.5  # how far above the allowed error a prediction may be and still be tried


@dataclasses.dataclass(slots=True)
class Search:
    """A search over which groups are low; a choice is bool[groups]."""

    matrix: np.ndarray  # of ``sensitivities``
    gains: np.ndarray  # what lowering each group saves
    allowed: float
    measure: Callable[[np.ndarray], float]  # runs a choice, and gives its error
    cost: Callable[[np.ndarray], float]
    most_runs: int
    errors: dict[bytes, float] = dataclasses.field(default_factory=dict)  # these do not run again
    _costs: dict[bytes, float] = dataclasses.field(default_factory=dict)

    def best(self) -> np.ndarray:
        """Return the cheapest choice that was run and is accurate enough."""
        first = cheapest(self.matrix, self.gains, self.allowed)
        return self._improved(first if self._passes(first) else self._repaired(first))

    @property
    def single(self) -> np.ndarray:
        """The predicted error of each group alone."""
        return predicted(self.matrix, np.eye(len(self.gains), dtype=bool))

    def _repaired(self, low: np.ndarray) -> np.ndarray:
        """Return the choice without the fewest of its most sensitive groups."""
        order = [g for g in np.argsort(-self.single, kind="stable") if low[g]]
        passing, failing = len(order), 0  # raised groups
        while passing - failing > 1 and self._may_run():
            middle = (passing + failing) // 2
            if self._passes(_without(low, order[:middle])):
                passing = middle
            else:
                failing = middle
        return _without(low, order[:passing])

    def _improved(self, best: np.ndarray) -> np.ndarray:
        """Try cheaper choices, the cheapest first, as long as prediction gives them hope."""
        while self._may_run():
            candidate = self._candidate(best)
            if candidate is None:
                break
            best = candidate if self._passes(candidate) else best
        return best

    def _candidate(self, best: np.ndarray) -> np.ndarray | None:
        """Return a choice that was not run, costs less, and may be accurate enough."""
        hopeful = self.allowed * _HOPEFUL / self._calibration()
        limit = self.cost_of(best) * _WORTHWHILE
        for low in in_order(self.matrix, self.gains, hopeful):
            if low @ self.gains <= best @ self.gains * 0.98:
                break  # gains are nearly those of the plan: nothing cheaper follows
            if low.tobytes() not in self.errors and self.cost_of(low) < limit:
                return low
        return None

    def _calibration(self) -> float:
        """Return the typical ratio of measured to predicted errors."""
        ratios = []
        for key, error in self.errors.items():
            expected = float(predicted(self.matrix, np.frombuffer(key, bool)))
            if expected > 0 and 0 < error < np.inf and np.isfinite(expected):
                ratios.append(error / expected)
        return float(np.clip(np.median(ratios), 0.2, 20)) if ratios else 1.0

    def _passes(self, low: np.ndarray) -> bool:
        key = low.tobytes()
        if not low.any():
            return True
        if key not in self.errors:
            self.errors[key] = self.measure(low)
        return self.errors[key] <= self.allowed

    def cost_of(self, low: np.ndarray) -> float:
        """Return what a choice costs, asked once."""
        key = low.tobytes()
        if key not in self._costs:
            self._costs[key] = self.cost(low)
        return self._costs[key]

    def _may_run(self) -> bool:
        return len(self.errors) < self.most_runs


def _without(low: np.ndarray, groups: list[int]) -> np.ndarray:
    raised = low.copy()
    raised[groups] = False
    return raised


def cheapest(matrix: np.ndarray, gains: np.ndarray, allowed: float) -> np.ndarray:
    """Return the choice of the largest gain, bool[groups], whose predicted error is allowed.

    >>> cheapest(np.array([[1.0, 2.0, 4.0]]), np.array([1.0, 1.0, 3.0]), 3.5)
    array([ True,  True, False])
    """
    return next(in_order(matrix, gains, allowed), np.zeros(len(gains), bool))


def in_order(matrix: np.ndarray, gains: np.ndarray, allowed: float) -> Iterator[np.ndarray]:
    """Return choices whose predicted error is allowed, those of the largest gain first.

    Of many groups only the best choice is looked for, with errors that add up as if independent.
    """
    if len(gains) <= _FEW:
        every = (np.arange(2 ** len(gains))[:, None] >> np.arange(len(gains))) & 1 == 1
        errors = predicted(matrix, every)
        for index in np.lexsort((errors, -(every @ gains))):
            if errors[index] <= allowed:
                yield every[index]
        return
    yield _knapsack(matrix, gains, allowed)


def _knapsack(matrix: np.ndarray, gains: np.ndarray, allowed: float) -> np.ndarray:
    from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import

    squares = (matrix**2).mean(axis=0)
    possible = np.isfinite(squares) & (squares <= allowed**2)
    weights = np.where(possible, squares, 0) / allowed**2
    found = milp(
        -gains,
        constraints=LinearConstraint(weights[None], ub=1.0),
        integrality=np.ones(len(gains)),
        bounds=Bounds(0, possible.astype(float)),
    )
    low = found.x > 0.5 if found.x is not None else np.zeros(len(gains), bool)
    for group in np.argsort(-squares):  # errors that add up with equal signs
        if predicted(matrix, low) <= allowed:
            break
        low[group] = False
    return low
