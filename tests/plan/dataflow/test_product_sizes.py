"""States of few dimensions beside the networks that move them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import amp, plan_of
from jaxamp.core.formats import Precision
from tests.numerics.oracle import products_rounded
from tests.programs.registry import Draw

ROWS, HIDDEN = 32, 64


def rollout(params, state, target):
    """A state to which a network adds little, six times; the loss does not see a common shift."""
    w1, b1, w2, b2 = params
    for _ in range(6):
        hidden = jnp.tanh((state - state.mean(0)) @ w1 + b1)
        state = state + 0.05 * (hidden @ w2 + b2)

    def apart(x):
        return jnp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1) + 1e-3)

    return jnp.mean(jnp.abs(apart(state) - apart(target)))


def arguments(dims):
    keys = jax.random.split(jax.random.key(0), 5)
    w1, b1 = jax.random.normal(keys[0], (dims, HIDDEN)) * 0.3, jnp.zeros(HIDDEN)
    w2, b2 = jax.random.normal(keys[1], (HIDDEN, dims)) / 8, jnp.zeros(dims)
    state, target = (jax.random.normal(key, (ROWS, dims)) * 2 for key in keys[2:4])
    return (w1, b1, w2, b2), state, target


@pytest.mark.product
@pytest.mark.parametrize("policy", ["mixed_bf16", "mixed_f16"])
def test_cotangents_of_a_small_state_reach_a_bias_unrounded(policy):
    """A shift changes no distance: the gradient of the last bias is a sum that cancels."""
    args, grad = arguments(3), jax.grad(rollout)
    got = jax.jit(amp(grad, policy=policy))(*args)
    shifts = np.abs(np.asarray(got[3], np.float64)).max()
    size = np.abs(np.asarray(grad(*args)[2], np.float64)).max()
    assert shifts <= 1e-5 * size


def narrow(dims):
    """How many results besides products' are stored narrow."""
    plan = plan_of(jax.grad(rollout), "mixed_bf16")(*arguments(dims))
    made = [d for d in plan.decisions() if d.primitive != "dot_general"]
    return sum(d.output is Precision.BF16 for d in made)


def test_only_what_is_small_stays_wide():
    assert narrow(3) < narrow(HIDDEN)


def test_what_products_alone_read_is_rounded():
    def scores(q, k, w):
        return (jnp.tanh(q @ w) * 0.3) @ k.T

    q, k, w = jnp.ones((8, 4)), jnp.ones((256, 4)), jnp.ones((4, 4))
    plan = plan_of(scores, "mixed_bf16")(q, k, w)
    scaled = [d for d in plan.decisions() if d.primitive in ("mul", "tanh")]
    assert Precision.BF16 in {d.output for d in scaled}


def count_loss(params, counts):
    """A negative binomial likelihood, whose mean and dispersion a recurrent cell predicts."""

    def step(h, now):
        seen, count = now
        h = jnp.tanh(jnp.concatenate([seen[:, None] / 72, h], -1) @ params["cell"])
        mean = 72 * jax.nn.softplus((h @ params["mean"])[:, 0]) + 1e-3
        shape = 1 / (jax.nn.softplus((h @ params["spread"])[:, 0]) / 8 + 1e-3)
        gamma = jax.lax.lgamma(count + shape) - jax.lax.lgamma(shape)
        return h, gamma + shape * jnp.log(shape / (shape + mean)) + count * jnp.log(
            mean / (shape + mean)
        )

    start = jnp.zeros((counts.shape[1], 16))
    return -jax.lax.scan(step, start, (counts[:-1], counts[1:]))[1].mean()


@pytest.mark.product("order")
@pytest.mark.parametrize("order", ["amp(grad)", "grad(amp)"])
@pytest.mark.parametrize("policy", ["auto_mixed_bf16", "auto_mixed"])
def test_partial_derivatives_that_a_loop_saves_are_not_rounded(policy, order):
    """Two digammas, one number of each row, nearly cancel once a cotangent multiplies them."""
    draw = Draw("counts")
    params = {
        name: draw.normal(*shape, scale=0.25)
        for name, shape in (("cell", (17, 16)), ("mean", (16, 1)), ("spread", (16, 1)))
    }
    counts = np.floor(72 * draw.uniform(20, 8) + 10).astype(np.float32)
    low = jnp.bfloat16 if "bf16" in policy else jnp.float16
    grad = jax.grad(count_loss)
    mixed = amp(grad, policy) if order == "amp(grad)" else jax.grad(amp(count_loss, policy))
    exact, rounded, found = (
        jax.jit(fn)(params, counts) for fn in (grad, products_rounded(grad, low), mixed)
    )
    for name in params:
        allowed = 2.5 * np.linalg.norm(rounded[name] - exact[name])
        assert 0 < np.linalg.norm(found[name] - exact[name]) <= allowed


def importance_gradient(w, old, x, labels):
    """Gradients of importance weights, over groups of rows in a loop."""

    def log_probability(w, x, label):
        logits = x @ w
        own = jnp.take_along_axis(logits, label[:, None], -1)[:, 0]
        return own - jax.nn.logsumexp(logits, -1)

    def step(total, group):
        x, label, before = group

        def weights(w, x):
            return jnp.exp(log_probability(w, x, label) - before).sum()

        of_w, of_x = jax.grad(weights, (0, 1))(w, x)
        return total + of_w, of_x

    before = jax.vmap(log_probability, (None, 0, 0))(old, x, labels)
    return jax.lax.scan(step, jnp.zeros_like(w), (x, labels, before))


@pytest.mark.parametrize("policy", ["mixed_bf16", "mixed_f16"])
def test_numbers_of_a_row_that_a_loop_reads_are_not_rounded(policy):
    """All groups together are larger than the products of one, but small beside those of all."""
    draw = Draw("groups")
    w, x = draw.normal(64, 48, scale=0.4), draw.normal(32, 8, 64)
    args = w, 0.9 * w, x, draw.integers(48, 32, 8)
    decisions = [*plan_of(importance_gradient, policy)(*args).decisions()]
    rows = [d for d in decisions if d.eqn.outvars[0].aval.shape == (32, 8)]
    assert rows
    assert not any(d.is_narrow for d in rows)
    assert sum(d.is_narrow for d in decisions if d.primitive == "dot_general") == 4
