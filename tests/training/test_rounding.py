"""Rounding to a narrower format: to the nearest number, and by chance."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import training
from jaxamp.errors import TrainingError
from jaxamp.training.low_params import nearest


def test_nearest_is_the_cast():
    """Rounding without a cast gives the numbers that a cast would, subnormal ones of f16 too."""
    values = np.random.default_rng(0).normal(size=2000) * 10.0 ** np.linspace(-9, 4, 2000)
    values = values.astype(np.float32)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        expected = np.asarray(values.astype(dtype).astype(np.float32))
        for rounded in (nearest(jnp.asarray(values), dtype), _compiled_nearest(values, dtype)):
            np.testing.assert_array_equal(rounded, expected)


def _compiled_nearest(values: Any, dtype: Any) -> Any:
    return jax.jit(lambda x: nearest(x, dtype))(values)


VALUES = np.float32([1.001, -3.3, 1e-3, 0.999, 255.7, -1e-30, 1e30, 1.9999])


def test_stochastic_rounding_is_unbiased():
    """The mean of 40,000 roundings is within four standard errors, for numbers of every size."""
    keys = jax.random.split(jax.random.key(0), 40_000)
    rounded = jax.vmap(lambda key: training.stochastic_round(VALUES, key))(keys)
    rounded = np.asarray(rounded.astype(jnp.float32), np.float64)
    error = rounded.mean(axis=0) - VALUES
    standard_error = rounded.std(axis=0) / np.sqrt(len(keys))
    assert (standard_error > 0).all()
    assert (np.abs(error) <= 4 * standard_error).all()


def test_stochastic_rounding_gives_neighbours_by_distance():
    """Only the two neighbours appear, each as often as the number is close to it."""
    value = np.float32(1 + 2.0**-7 * 0.25)  # a quarter of the way from 1 to the next number
    keys = jax.random.split(jax.random.key(1), 10_000)
    rounded = jax.vmap(lambda key: training.stochastic_round(value, key))(keys)
    numbers, counts = np.unique(np.asarray(rounded, np.float32), return_counts=True)
    assert numbers.tolist() == [1.0, 1.0 + 2.0**-7]
    assert abs(counts[1] - 2500) < 4 * np.sqrt(10_000 * 0.25 * 0.75)


def test_stochastic_rounding_keeps_what_bfloat16_has():
    """Numbers of bfloat16, infinities, NaN and signed zeros come back whatever the key."""
    kept = np.float32([0.0, -0.0, 1.0, -257 * 2.0**-8 + 2.0**-8, 3e38, np.inf, -np.inf, np.nan])
    kept = kept.astype(jnp.bfloat16)
    for seed in range(20):
        rounded = training.stochastic_round(kept.astype(np.float32), jax.random.key(seed))
        np.testing.assert_array_equal(
            np.asarray(rounded, np.float32).view(np.uint32), kept.astype(np.float32).view(np.uint32)
        )


def test_stochastic_rounding_is_from_float32():
    """Other dtypes are refused, in words."""
    with pytest.raises(TrainingError, match="from float32 to bfloat16, not from float16"):
        training.stochastic_round(jnp.ones(2, jnp.float16), jax.random.key(0))
