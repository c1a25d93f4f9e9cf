"""The cheapest labelling, found by trying all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress, product

from tests.placement.cost import cost
from tests.placement.problem import Problem


def labellings(problem: Problem) -> Iterator[list[bool]]:
    """Every labelling that the problem allows."""
    free = problem.free
    for choice in product((False, True), repeat=len(free)):
        yield problem.spread(list(compress(free, choice)))


def cheapest(problem: Problem) -> int:
    """What the cheapest labelling costs."""
    return min(cost(problem, labels) for labels in labellings(problem))
