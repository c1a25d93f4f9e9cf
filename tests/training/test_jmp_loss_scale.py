"""jmp's loss scales go in and come out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jmp
import pytest

from jaxamp.errors import TrainingError
from jaxamp.training import DynamicLossScale, NoOpLossScale, StaticLossScale
from jaxamp.training.jmp_loss_scale import loss_scale_from_jmp, loss_scale_to_jmp

OURS = {
    "noop": NoOpLossScale(),
    "static": StaticLossScale(8.0),
    "dynamic": DynamicLossScale(jnp.float32(64), jnp.int32(3), 5, 4, jnp.float32(16)),
}


@pytest.mark.parametrize("scale", OURS.values(), ids=OURS)
def test_there_and_back(scale):
    """Every field that jmp has survives the way there and back."""
    theirs = loss_scale_to_jmp(scale)
    assert type(theirs).__module__.startswith("jmp")
    assert loss_scale_from_jmp(theirs) == scale


def test_the_floor_survives_jit_once_converted():
    """jmp's own object loses its floor in jit; converted before, it keeps it."""
    theirs = jmp.DynamicLossScale(jnp.float32(64), min_loss_scale=jnp.float32(16))
    identity = jax.jit(lambda scale: scale)
    assert identity(theirs).min_loss_scale == 1
    assert identity(loss_scale_from_jmp(theirs)).min_loss_scale == 16


def test_conversion_inside_jit():
    """Traced numbers convert too."""

    @jax.jit
    def step(scale):
        return loss_scale_to_jmp(loss_scale_from_jmp(scale).adjust(jnp.bool_(False)))

    assert step(jmp.DynamicLossScale(jnp.float32(64))).loss_scale == 32


def test_strangers_are_refused():
    """What is not a loss scale of the library in question is named."""
    with pytest.raises(TrainingError, match="not a loss scale of jmp"):
        loss_scale_from_jmp(DynamicLossScale())
    with pytest.raises(TrainingError, match="not a loss scale of jaxamp"):
        loss_scale_to_jmp(jmp.NoOpLossScale())
