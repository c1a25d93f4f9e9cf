"""Scaling and unscaling: exact by powers of two, in float32, of floats only."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxamp
from jaxamp import training
from jaxamp.training import DynamicLossScale, StaticLossScale


@pytest.mark.parametrize("exponent", [-20, 0, 15, 16, 40, 100, 126])
@pytest.mark.parametrize("cls", [StaticLossScale, DynamicLossScale])
def test_unscaling_by_a_power_of_two_is_exact(cls, exponent):
    """What was scaled comes back bit by bit, compiled or not, also at the largest scale."""
    values = np.random.default_rng(exponent % 7).normal(size=1000).astype(np.float32)
    values *= np.float32(2.0 ** -max(exponent - 100, 0))  # the product is to be finite
    scale = cls(2.0**exponent)
    for run in (lambda f, x: f(x), lambda f, x: jax.jit(f)(x)):
        scaled = run(scale.scale, values)
        np.testing.assert_array_equal(scaled, np.ldexp(values, exponent))
        np.testing.assert_array_equal(run(scale.unscale, scaled), values)


def test_unscaling_by_other_factors_is_close():
    """A factor that is no power of two costs two roundings."""
    values = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    np.testing.assert_allclose(StaticLossScale(3.0).unscale(values), values / 3.0, rtol=2.0**-22)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("scale", [StaticLossScale(2.0**20), DynamicLossScale(2.0**20)])
def test_narrow_values_scale_in_float32(dtype, scale):
    """A float16 loss times a large scale is no infinity, and gradients unscale to float32."""
    tiny = jnp.array([1.0, 2.0**-24], dtype)
    for result, exponent in ((scale.scale(tiny), 20), (scale.unscale(tiny), -20)):
        assert result.dtype == jnp.float32
        np.testing.assert_array_equal(result, np.ldexp(np.float32(tiny), exponent))


@pytest.mark.parametrize("wide", [jnp.float16, jnp.float32])
def test_a_float16_scale_can_be_adjusted(wide):
    """A scale given in float16 is kept in float32, where it can grow past 65504."""
    scale = DynamicLossScale(wide(2.0**15), period=1)
    assert scale.loss_scale.dtype == jnp.float32
    assert float(scale.adjust(True).loss_scale) == 2.0**16


def test_leaves_that_are_no_floats_stay():
    """Steps, keys, names and nothing are not multiplied."""
    tree = {"step": 3, "count": jnp.int32(7), "key": jax.random.key(0), "name": "relu", "no": None}
    for method in (DynamicLossScale().scale, StaticLossScale(4).unscale):
        result = method(tree)
        assert all(result[name] is tree[name] for name in tree)


def test_amp_leaves_the_arithmetic_alone():
    """Inside a train step under amp the scaling stays in float32, where 2¹⁷ is no infinity."""
    scale = DynamicLossScale(2.0**17, period=1)

    @functools.partial(jaxamp.amp, policy="auto_mixed")
    def step(w, x, scale):
        def loss_fn(w):
            return scale.scale(jnp.mean(jnp.tanh(x @ w)))

        grads = scale.unscale(jax.grad(loss_fn)(w))
        return grads, scale.adjust(training.all_finite(grads))

    w, x = jnp.full((3, 2), 0.1), jnp.full((64, 3), 1e-3)
    grads, adjusted = step(w, x, scale)
    expected = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
    np.testing.assert_allclose(grads, expected, rtol=1e-2)
    assert float(adjusted.loss_scale) == 2.0**18
