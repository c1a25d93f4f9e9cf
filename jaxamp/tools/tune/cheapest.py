"""Search for the cheapest set of groups to lower whose predicted error is allowed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxamp.tools.tune.sensitivity import predicted

_FEW = 14  # groups whose every choice is looked at


def cheapest(matrix: np.ndarray, gains: np.ndarray, allowed: float) -> np.ndarray:
    """Return the choice of the largest gain with an allowed predicted error.

    Args:
      matrix: f64[projections, groups], see ``sensitivities``.
      gains: f64[groups], what lowering each group saves.
      allowed: largest error.

    Returns:
      bool[groups], which groups are low.

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
