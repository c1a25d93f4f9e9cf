"""What is refused as a loss scale, in words, and what is accepted."""

from __future__ import annotations

import jmp
import numpy as np
import pytest

from jaxamp.errors import TrainingError
from jaxamp.training import DynamicLossScale, StaticLossScale
from jaxamp.training.loss_scale import as_loss_scale


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DynamicLossScale(0.0), "loss_scale is a positive number up to"),
        (lambda: DynamicLossScale(np.inf), "loss_scale is a positive"),
        (lambda: DynamicLossScale(2.0**127), "loss_scale is a positive"),
        (lambda: DynamicLossScale(np.nan), "loss_scale is a positive"),
        (lambda: StaticLossScale(-2), "loss_scale is a positive"),
        (lambda: StaticLossScale(np.ones(3)), "loss_scale is a positive"),
        (lambda: DynamicLossScale(period=0), "period counts steps"),
        (lambda: DynamicLossScale(factor=0.5), "factor multiplies a scale that grows"),
        (lambda: DynamicLossScale(backoff=2.0), "backoff shrinks"),
        (lambda: DynamicLossScale(min_loss_scale=-1.0), "min_loss_scale"),
        (lambda: DynamicLossScale(min_loss_scale=8, max_loss_scale=4), "above its ceiling"),
        (lambda: as_loss_scale(1024.0), "1024.0 is not a loss scale.*StaticLossScale"),
    ],
)
def test_wrong_numbers_teach(make, message):
    """Numbers that make no sense are refused where they are given."""
    with pytest.raises(TrainingError, match=message):
        make()


def test_objects_of_ones_own_are_accepted():
    """Whatever has the three methods is a loss scale."""

    class Mine(jmp.NoOpLossScale):
        pass

    Mine.__module__ = "elsewhere"
    mine = Mine()
    assert as_loss_scale(mine) is mine
