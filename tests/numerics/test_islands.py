"""Reduction islands: low precision in and out, float32 inside, rounded once."""

from __future__ import annotations

import itertools

import pytest

from tests.numerics import waiting
from tests.numerics.distances import NEIGHBOUR, QUANTITIES, island_distance
from tests.numerics.islands import ISLANDS
from tests.numerics.ulps import LOW

pytestmark = pytest.mark.long


def _marked() -> list[object]:
    params = []
    for key in itertools.product(ISLANDS, LOW, QUANTITIES):
        reason = waiting.ISLANDS.get(key)
        marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
        params.append(pytest.param(*key, id="-".join(key), marks=marks))
    return params


@pytest.mark.parametrize(("name", "low", "quantity"), _marked())
def test_rounded_once(name: str, low: str, quantity: str) -> None:
    """Value and gradients are those of float32 from the low input, within one low number."""
    assert island_distance(name, low, quantity) <= NEIGHBOUR


def test_waiting_entries_exist() -> None:
    """Nothing waits under a name that is gone."""
    assert set(waiting.ISLANDS) <= set(itertools.product(ISLANDS, LOW, QUANTITIES))
