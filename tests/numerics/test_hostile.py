"""Programs that careless low precision ruins, under jaxamp's presets."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.numerics import waiting
from tests.numerics.hostile import CASES
from tests.numerics.measure import Measured, plain
from tests.numerics.ulps import LOW


def _marked() -> list[object]:
    """Every case in both formats; what waits is marked."""
    params = []
    for case in CASES.values():
        for low in LOW:
            reason = waiting.HOSTILE.get((case.name, low))
            marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
            params.append(pytest.param(case.name, low, id=f"{case}-{low}", marks=marks))
    return params


def test_there_are_enough_cases() -> None:
    """The table has at least sixty cases, in at least eight families, each with its stake."""
    assert len(CASES) >= 60
    assert len({case.family for case in CASES.values()}) >= 8
    assert all(case.stake.endswith(".") for case in CASES.values())


@pytest.mark.product("name", every=5)
@pytest.mark.parametrize(("name", "low"), _marked())
def test_error_is_that_of_rounding_the_products(name: str, low: str) -> None:
    """No NaN that float32 lacks, and 2 ulps at most beyond rounded operands of products."""
    measured = Measured(CASES[name], low)
    assert measured.error("amp") <= measured.bound


@pytest.mark.long
@pytest.mark.parametrize("name", CASES, ids=lambda name: str(CASES[name]))
def test_the_case_is_hostile(name: str) -> None:
    """Float32 is finite, and some careless way of lowering the case is beyond the bound."""
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(plain(name)))
    assert any(Measured(CASES[name], low).hostile for low in LOW)


@pytest.mark.parametrize("entry", waiting.HOSTILE, ids="-".join)
def test_waiting_entries_exist(entry: tuple[str, str]) -> None:
    """Nothing waits under a name that is gone."""
    name, low = entry
    assert name in CASES
    assert low in LOW
