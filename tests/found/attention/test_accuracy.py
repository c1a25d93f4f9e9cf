"""Every program of the corpus, its attention replaced and computed as kernels round it."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxamp
from tests.found.attention import imitation
from tests.found.attention.accuracy import ONCE, POLICIES, check, compare
from tests.found.attention.corpus import EXTRA_TERMS, NEAR_MISSES, SPELLINGS, weigh
from tests.found.attention.finding import FORWARD, JOINT, ORDERS

PROGRAMS = SPELLINGS | NEAR_MISSES | EXTRA_TERMS
CASES = [
    ("jax_nn_causal", "bfloat16", FORWARD),
    ("tril_and_minus_inf", "float16", JOINT),
    ("keys_repeated", "bfloat16", JOINT),
    ("learnt_temperature", "bfloat16", FORWARD),
    ("nothing_seen_finite", "bfloat16", FORWARD),
    ("derivative_of_a_derivative", "float16", FORWARD),
    pytest.param("nothing_seen_zero", "bfloat16", FORWARD, marks=pytest.mark.long),
    pytest.param("nothing_seen_causal", "bfloat16", FORWARD, marks=pytest.mark.long),
    pytest.param("nothing_seen_twice", "bfloat16", FORWARD, marks=pytest.mark.long),
]
"""All others: `python -m tests.found.attention --accuracy`."""


@pytest.mark.product("name")
@pytest.mark.parametrize(("name", "dtype", "order"), CASES)
def test_it_is_as_accurate_as_written_out(name, dtype, order):
    """Results and gradients within 1.5 times the error of the form that is not replaced."""
    check(PROGRAMS[name], dtype, order)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("nothing_seen_finite", marks=pytest.mark.long),
        pytest.param("nothing_seen_infinite", marks=pytest.mark.long),
        "nothing_seen_zero",
        "nothing_seen_added_low",
    ],
)
def test_rows_that_see_nothing_in_a_train_step(name):
    """With a mask that is an argument: results and gradients are the program's, NaN included."""
    fn, args = EXTRA_TERMS[name].built

    def step(*args):
        def loss(*qkv):
            out = fn(*qkv, *args[3:])
            return weigh(out), out

        (_, out), (dq, dk, dv) = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*args[:3])
        return out, dq, dk, dv

    policy = jaxamp.PrecisionPolicy.MIXED_BF16.replace(fused_attention=True)
    assert [a.backward for a in jaxamp.plan_of(step, policy)(*args).found] == [True]
    others = jaxamp.amp(step, policy.replace(fused_attention=False))(*args)
    with imitation.kernels():
        mine = jaxamp.amp(step, policy)(*args)
    with jax.enable_x64(True):
        exact = jax.jit(step)(*(np.float64(x) if x.dtype == np.float32 else x for x in args))
    for got, other, want in zip(*map(jax.device_get, (mine, others, exact)), strict=True):
        assert (np.isnan(got) == np.isnan(want)).all()
        compare(np.nan_to_num(got), np.nan_to_num(other), np.nan_to_num(want), "bfloat16")


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "dtype", "order"), ONCE, ids=[f"{p.name}-{d}-{o}" for p, d, o in ONCE]
)
def test_every_program_once(program, dtype, order):
    """Of the corpus, formats and orders in turn."""
    check(program, dtype, order)


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
