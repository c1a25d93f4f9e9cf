"""What a loss scale's methods do: jmp's published cases, restated."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp.errors import TrainingError
from jaxamp.training import DynamicLossScale, NoOpLossScale, StaticLossScale


def test_no_op_returns_the_tree_itself():
    """Scaling by nothing copies nothing."""
    scale, tree = NoOpLossScale(), {"a": jnp.ones([])}
    assert scale.scale(tree) is tree
    assert scale.unscale(tree) is tree
    assert scale.adjust(jnp.bool_(False)) is scale
    assert scale.loss_scale == 1
    assert jax.tree.leaves(scale) == []


@pytest.mark.parametrize("cls", [StaticLossScale, DynamicLossScale])
@pytest.mark.parametrize("factor", [2, 3, 4.0])
def test_scale_and_unscale_a_tree(cls, factor):
    """Python numbers serve as factors; scaling and unscaling are inverse."""
    scale, tree = cls(factor), {"a": jnp.array(1.0)}
    scaled = scale.scale(tree)
    assert scaled == {"a": jnp.array(1.0 * factor)}
    assert scale.unscale(scaled) == tree


def test_static_is_never_adjusted():
    """Whatever the gradients are, the same object comes back."""
    scale = StaticLossScale(8.0)
    assert scale.adjust(jnp.bool_(False)) is scale


def test_construction_warns_of_nothing():
    """A Python float as the scale is what everybody writes."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DynamicLossScale(2.0**15)


@pytest.mark.parametrize(("period", "factor"), [(20, 2), (30, 3)])
def test_increases_on_finite(period, factor):
    """The counter counts to the period, then the scale grows and the counter starts anew."""
    scale = DynamicLossScale(jnp.float32(10), jnp.int32(0), period, factor)
    for i in range(1, period):
        scale = scale.adjust(jnp.bool_(True))
        assert (scale.loss_scale, scale.counter) == (10, i)
        assert (scale.period, scale.factor) == (period, factor)
    scale = scale.adjust(jnp.bool_(True))
    assert (scale.loss_scale, scale.counter) == (10 * factor, 0)


@pytest.mark.parametrize(
    ("period", "factor", "floor"),
    [(20, 2, None), (30, 3, None), (20, 2, 0.3125), (30, 3, 0.37), (5.0, 2.0, 0.0)],
)
def test_reduces_on_nonfinite_down_to_the_floor(period, factor, floor):
    """Every bad step divides, and none goes below the floor, 1 where none is given."""
    floors = () if floor is None else (jnp.asarray(floor),)
    scale = DynamicLossScale(jnp.float32(10), jnp.int32(0), period, factor, *floors)
    for i in range(100):
        scale = scale.adjust(jnp.bool_(False))
        expected = max(1.0 if floor is None else floor, 10 / factor ** (i + 1))
        np.testing.assert_allclose(scale.loss_scale, expected, rtol=1e-5)
        assert scale.counter == 0


def test_adjust_wants_a_boolean_scalar():
    """A vector of flags, or a number, is refused in words."""
    for wrong in (jnp.ones([3], bool), jnp.float32(1), 1):
        with pytest.raises(TrainingError, match=r"boolean scalar.*all_finite"):
            DynamicLossScale().adjust(wrong)


def test_integer_scales_become_floats():
    """Where jmp warns, the number is taken as what it says."""
    scale = DynamicLossScale(jnp.int32(8), min_loss_scale=jnp.int32(2))
    assert scale.loss_scale.dtype == scale.min_loss_scale.dtype == jnp.float32
