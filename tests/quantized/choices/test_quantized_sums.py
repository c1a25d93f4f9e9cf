"""Sums of results of quantized dots are bfloat16, where the terms are read for nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import Precision, PrecisionPolicy, amp, plan_of
from tests.quantized.lowp.models import policy

CURRENT = policy("fp8_current")
W, V = jnp.ones((64, 32)), jnp.ones((64, 32))
X = jnp.ones((16, 64))


def gated(w, v, x):
    """The cotangent of the normed activation is a sum of two products, and is read three times."""
    normed = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return jnp.mean((jnp.tanh(normed @ w) * (normed @ v)) ** 2)


def deep(w, v, u, x):
    return gated(w, v, jnp.tanh(x @ u))


def sums(fn, chosen, *args):
    """In what the sum of two cotangents is stored, and what is said of it."""
    found = [d for d in plan_of(fn, chosen)(*args).decisions() if d.primitive == "add_any"]
    return [(d.outputs[0], d.reason) for d in found if "one product adds" in d.reason]


def test_a_cotangent_of_two_products_is_one_array():
    gradient = jax.grad(deep, argnums=(0, 1, 2))
    assert len(sums(gradient, CURRENT, W, V, jnp.eye(64), X)) == 1
    assert sums(gradient, CURRENT, W, V, jnp.eye(64), X)[0][0] is Precision.BF16
    assert sums(gradient, PrecisionPolicy.MIXED_BF16, W, V, jnp.eye(64), X) == []


def test_what_leaves_the_program_stays_in_float32():
    """The cotangent of the input is returned as it is added up."""

    def plain(w, v, x):
        return jnp.mean((jnp.tanh(x @ w) * (x @ v)) ** 2)

    assert sums(jax.grad(plain, argnums=2), CURRENT, W, V, X) == []


def test_terms_that_are_read_again_are_added_in_float32():
    """They are in memory for their other readers."""

    def again(w, v, x):
        a, b = jnp.tanh(x) @ w, jnp.tanh(x) @ v
        return jnp.tanh((a + b) * a) @ w.T

    decisions = plan_of(again, CURRENT)(W, V, X).decisions()
    assert not any("one product adds" in d.reason for d in decisions)


def test_the_sum_is_as_exact_as_its_terms():
    """One more rounding to eight bits counts for nothing beside those of the operands to four."""
    keys = jax.random.split(jax.random.key(0), 4)
    w, v, u = (
        jax.random.normal(k, s) / 8
        for k, s in zip(keys[:3], [(64, 32)] * 2 + [(64, 64)], strict=True)
    )
    x = jax.random.normal(keys[3], (256, 64))
    gradient = jax.grad(deep, argnums=2)
    with jax.enable_x64(True):
        exact = np.asarray(gradient(*(a.astype(jnp.float64) for a in (w, v, u, x))))
    got = jax.jit(amp(gradient, CURRENT))(w, v, u, x)
    alone = jax.jit(jax.grad(amp(deep, CURRENT), argnums=2))(w, v, u, x)  # JAX adds these up
    error, other = (np.linalg.norm(np.asarray(g) - exact) for g in (got, alone))
    assert error == pytest.approx(other, rel=0.05)
