"""Trajectories of the dynamic loss scale, beside PyTorch's."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp.training import DynamicLossScale
from tests.training.trajectory import our_trajectory

# PyTorch's published rule as a table. A state is (scale, finite steps in a row).
#   gradients | row complete            | next scale      | next count
#   not finite| -                       | scale * backoff | 0
#   finite    | no                      | scale           | count + 1
#   finite    | yes, scale * growth inf | scale           | 0
#   finite    | yes                     | scale * growth  | 0
TORCH = {
    (False, False): lambda scale, count, growth, backoff: (scale * backoff, 0),
    (False, True): lambda scale, count, growth, backoff: (scale * backoff, 0),
    (True, False): lambda scale, count, growth, backoff: (scale, count + 1),
    (True, True): lambda scale, count, growth, backoff: (
        (scale * growth if np.isfinite(np.float32(scale * growth)) else scale),
        0,
    ),
}


def torch_trajectory(
    script: Any, scale: Any, growth: float, backoff: float, interval: int
) -> list[tuple[np.float32, int]]:
    """Scales and counts after each step, products in double and rounded to float32."""
    states, count = [], 0
    for finite in script:
        rule = TORCH[bool(finite), count + 1 == interval]
        with np.errstate(over="ignore"):
            scale, count = rule(float(scale), count, growth, backoff)
            scale = np.float32(scale)
        states.append((scale, count))
    return states


SCRIPTS = {
    "all finite": [True] * 40,
    "never finite": [False] * 20,
    "one bad step": [True] * 7 + [False] + [True] * 20,
    "bad at the end of a row": ([True] * 3 + [False]) * 8,
    "bad after growth": ([True] * 4 + [False]) * 8,
    "alternating": [True, False] * 12,
    "chance": (np.random.default_rng(0).random(90) > 0.15).tolist(),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize(
    ("growth", "backoff", "interval"),
    [(2.0, 0.5, 4), (2.0, 0.5, 1), (4.0, 0.25, 3), (1.5, 0.75, 4)],
)
def test_trajectory_is_that_of_grad_scaler(script, growth, backoff, interval):
    """Bit by bit the scales and counts of PyTorch's algorithm, from its own first scale."""
    scale = DynamicLossScale(
        65536.0, period=interval, factor=growth, backoff=backoff, min_loss_scale=0.0
    )
    assert our_trajectory(script, scale) == torch_trajectory(
        script, 65536.0, growth, backoff, interval
    )


def test_trajectory_written_out():
    """One script by hand, so that the table above has a witness."""
    script = [True, True, True, False, True, True, True, True, False, False]
    scales = [s for s, _ in our_trajectory(script, DynamicLossScale(8.0, period=3))]
    assert scales == [8, 8, 16, 8, 8, 8, 16, 16, 8, 4]
    assert scales == [s for s, _ in torch_trajectory(script, 8.0, 2.0, 0.5, 3)]


def test_growth_stops_before_infinity():
    """The scale grows to the last one that float32 can invert, and stays there."""
    trajectory = our_trajectory([True] * 6, DynamicLossScale(2.0**124, period=1))
    assert [s for s, _ in trajectory] == [2.0**125, *[2.0**126] * 5]
    assert trajectory[:2] == torch_trajectory([True] * 2, 2.0**124, 2.0, 0.5, 1)


def test_defaults_are_the_documented_ones():
    """2¹⁵, twice after 2000 finite steps, half after an overflow, at least 1."""
    scale = DynamicLossScale()
    assert float(scale.loss_scale) == 2.0**15
    row = our_trajectory([True] * 2000 + [False], scale)
    assert [s for s, _ in row[-3:]] == [2.0**15, 2.0**16, 2.0**15]
    assert our_trajectory([False] * 20, scale)[-1] == (1.0, 0)


@pytest.mark.parametrize("finite", [True, False])
def test_floor_and_ceiling_hold(finite):
    """At the ceiling finite steps change nothing, at the floor overflows do not."""
    scale = DynamicLossScale(64.0, period=1, min_loss_scale=64.0, max_loss_scale=64.0)
    assert our_trajectory([finite] * 4, scale) == [(64.0, 0)] * 4
    free = DynamicLossScale(64.0, period=1, min_loss_scale=8.0, max_loss_scale=512.0)
    assert our_trajectory([finite] * 9, free)[-1] == (512.0 if finite else 8.0, 0)


def test_a_row_longer_than_the_period_ends():
    """A checkpoint of a run with a longer period grows at once instead of never."""
    scale = DynamicLossScale(8.0, jnp.int32(100), period=10)
    assert float(scale.adjust(True).loss_scale) == 16.0
