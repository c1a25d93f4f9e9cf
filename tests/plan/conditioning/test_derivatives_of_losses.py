"""Cotangents that no product has propagated yet: those of a loss, which nearly cancel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxamp import amp
from tests.numerics.oracle import products_rounded
from tests.programs.registry import Draw

DRAW = Draw("derivatives_of_losses")
W, X = DRAW.weight(16, 40), DRAW.normal(128, 8, 16)
REWARDS = DRAW.normal(128, 8)


def advantages(w: jax.Array, x: jax.Array) -> jax.Array:
    """Each value is read twice: as what a state is worth, and the state before it."""
    values = (x @ w)[..., 0]

    def step(after, read):
        reward, value, following = read
        after = reward + 0.99 * following - value + 0.94 * after
        return after, after

    following = jnp.roll(values, -1, 0)
    _, found = lax.scan(step, jnp.zeros(8), (REWARDS, values, following), reverse=True)
    return jnp.mean(found**2)


def states(w: jax.Array, x: jax.Array) -> jax.Array:
    """What comes of each step is nearly as probable as predicted."""

    def step(total, log_probability):
        return jnp.logaddexp(total, log_probability), None

    total, _ = lax.scan(step, jnp.zeros((8, 40)), jax.nn.log_softmax(x @ w))
    return -total.mean()


@pytest.mark.parametrize("loss", [advantages, states])
def test_a_loss_is_differentiated_as_it_is_computed(loss) -> None:
    fn = jax.value_and_grad(loss, argnums=(0, 1))
    found, exact = (jax.jit(f)(W, X) for f in (amp(fn, "mixed_bf16"), fn))
    rounded = jax.jit(products_rounded(fn, jnp.bfloat16))(W, X)
    for made, by_hand, true in zip(found[1], rounded[1], exact[1], strict=True):
        assert np.linalg.norm(made - true) <= 1.5 * np.linalg.norm(by_hand - true)
