"""Every program of the corpus, its attention replaced and computed as kernels round it."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.attention import near_misses, of_packages, spellings  # noqa: F401
from tests.attention.accuracy import POLICIES, check
from tests.attention.corpus import EXTRA_TERMS, NEAR_MISSES, SPELLINGS
from tests.attention.finding import FORWARD, JOINT, ORDERS

PROGRAMS = SPELLINGS | NEAR_MISSES | EXTRA_TERMS
CASES = [
    ("jax_nn_causal", "bfloat16", FORWARD),
    ("tril_and_minus_inf", "float16", JOINT),
    ("keys_repeated", "bfloat16", JOINT),
    ("learnt_temperature", "bfloat16", FORWARD),
    ("nothing_seen_finite", "bfloat16", FORWARD),
    ("nothing_seen_zero", "bfloat16", FORWARD),
    ("nothing_seen_added_low", "float16", FORWARD),
    ("nothing_seen_causal", "bfloat16", FORWARD),
    ("nothing_seen_twice", "bfloat16", FORWARD),
]
"""All others: `python -m tests.attention --accuracy`, which not all pass yet."""


@pytest.mark.parametrize(("name", "dtype", "order"), CASES)
def test_it_is_as_accurate_as_written_out(name, dtype, order):
    """Results and gradients within 1.5 times the error of the form that is not replaced."""
    check(PROGRAMS[name], dtype, order)


@pytest.mark.long
@pytest.mark.parametrize("dtype", POLICIES)
@pytest.mark.parametrize("spread", [5.0, 30.0])
@pytest.mark.parametrize(
    "name", ["jax_nn_causal", "by_hand", "relative_positions", "keys_repeated"]
)
def test_large_logits(name, spread, dtype):
    """Of standard deviation 5 and 30."""
    for order in ORDERS:
        check(SPELLINGS[name], dtype, order, spread)


@pytest.mark.long
@pytest.mark.parametrize("dtype", POLICIES)
@pytest.mark.parametrize(
    ("length", "spread"), [(512, 30.0), (2048, 5.0), (4096, 1.0), (4096, 30.0)]
)
def test_long_sequences(length, spread, dtype):
    """Up to 4,096 words, causal."""

    def build():
        draw = np.random.default_rng(0)
        q, k, v = (draw.standard_normal((1, length, 1, 64)).astype(np.float32) for _ in range(3))
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), (q, k, v)

    program = dataclasses.replace(SPELLINGS["jax_nn_causal"], build=build)
    for order in ORDERS:
        check(program, dtype, order, spread)
