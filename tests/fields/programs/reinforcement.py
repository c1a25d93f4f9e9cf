"""Reinforcement learning."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.fields.layers import attend, causal, gru, layer_norm, mlp
from tests.fields.registry import program


def _advantages(rewards, values, dones, gamma=0.99, lam=0.95):
    def step(last, inputs):
        reward, value, following, done = inputs
        delta = reward + gamma * following * (1 - done) - value
        last = delta + gamma * lam * (1 - done) * last
        return last, last

    _, adv = lax.scan(
        step, jnp.zeros_like(values[0]), (rewards, values[:-1], values[1:], dones), reverse=True
    )
    return adv


@program(
    lambda d: (
        (d.layers(8, 64, 64, 4), d.layers(8, 64, 1)),
        d.normal(17, 8, 8),
        d.integers(4, 16, 8),
        d.normal(16, 8, scale=0.1) - 1.4,
        d.normal(16, 8, scale=20),
        (d.uniform(16, 8) < 0.1).astype("f"),
    ),
    aux=True,
)
def ppo(params, obs, actions, old_logp, rewards, dones):
    """Clipped policy ratios with generalized advantages; KL, entropy and ratio as aux."""
    policy, critic = params
    values = mlp(critic, obs, jnp.tanh)[..., 0]
    adv = _advantages(rewards, lax.stop_gradient(values), dones)
    returns = adv + lax.stop_gradient(values[:-1])
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    logits = jax.nn.log_softmax(mlp(policy, obs[:-1], jnp.tanh))
    logp = jnp.take_along_axis(logits, actions[..., None], -1)[..., 0]
    ratio = jnp.exp(logp - old_logp)
    gain = jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.2) * adv).mean()
    entropy = -(jnp.exp(logits) * logits).sum(-1).mean()
    value_loss = jnp.mean((values[:-1] - returns) ** 2)
    loss = -gain + 0.5 * value_loss / 400.0 - 0.01 * entropy
    return loss, {
        "ratio": ratio,
        "kl": (ratio - 1 - (logp - old_logp)).mean(),
        "entropy": entropy,
        "values": values,
    }


@program(
    lambda d: (
        d.layers(10, 64, 64, 5),
        d.layers(10, 64, 64, 5),
        d.normal(32, 10),
        d.integers(5, 32),
        d.normal(32, scale=5),
        d.normal(32, 10),
        d.mask(32),
    ),
    aux=True,
)
def double_dqn(params, target, obs, actions, rewards, following, alive):
    """Actions of one network, valued by the other; Huber's loss and priorities."""
    q = mlp(params, obs)[jnp.arange(32), actions]
    best = mlp(params, following).argmax(-1)
    ahead = mlp(target, following)[jnp.arange(32), best]
    goal = lax.stop_gradient(rewards + 0.99 * alive * ahead)
    td = q - goal
    return optax.huber_loss(td).mean(), {"td": td, "q": q}


@program(
    lambda d: ((d.layers(11, 64, 6), d.layers(14, 64, 1)), d.normal(32, 11), d.normal(32, 3)),
    aux=True,
)
def soft_actor(params, obs, noise):
    """A squashed Gaussian policy with the correction of its density."""
    policy, critic = params
    mu, log_std = jnp.split(mlp(policy, obs), 2, -1)
    log_std = jnp.clip(log_std, -5, 2)
    raw = mu + jnp.exp(log_std) * noise
    action = jnp.tanh(raw)
    logp = (-0.5 * noise**2 - log_std - 0.919).sum(-1)
    logp -= (2 * (jnp.log(2.0) - raw - jax.nn.softplus(-2 * raw))).sum(-1)
    q = mlp(critic, jnp.concatenate([obs, action], -1))[:, 0]
    return (0.2 * logp - q).mean(), {"logp": logp, "action": action, "entropy": -logp.mean()}


@program(
    lambda d: (
        d.layers(10, 64, 153),
        d.layers(10, 64, 153),
        d.normal(16, 10),
        d.integers(3, 16),
        d.normal(16, scale=2),
        d.normal(16, 10),
    )
)
def distributional_c51(params, target, obs, actions, rewards, following):
    """Returns as shares of 51 atoms, projected onto the grid."""
    atoms = jnp.linspace(-10.0, 10.0, 51)
    shares = jax.nn.softmax(mlp(target, following).reshape(16, 3, 51))
    best = (shares * atoms).sum(-1).argmax(-1)
    p = shares[jnp.arange(16), best]
    places = jnp.clip(rewards[:, None] + 0.99 * atoms, -10, 10)
    weight = jnp.clip(1 - jnp.abs(places[:, None] - atoms[None, :, None]) / 0.4, 0, 1)
    goal = lax.stop_gradient((weight * p[:, None]).sum(-1))
    logits = mlp(params, obs).reshape(16, 3, 51)[jnp.arange(16), actions]
    return -(goal * jax.nn.log_softmax(logits)).sum(-1).mean()


@program(
    lambda d: (
        d.layers(10, 64, 96),
        d.layers(10, 64, 96),
        d.normal(16, 10),
        d.integers(3, 16),
        d.normal(16, scale=50),
        d.normal(16, 10),
    ),
    aux=True,
)
def quantile_regression_dqn(params, target, obs, actions, rewards, following):
    """Thirty-two quantiles of the return, with Huber's loss of all pairs."""
    ahead = mlp(target, following).reshape(16, 3, 32)
    best = ahead.mean(-1).argmax(-1)
    goal = lax.stop_gradient(rewards[:, None] + 0.99 * ahead[jnp.arange(16), best])
    q = mlp(params, obs).reshape(16, 3, 32)[jnp.arange(16), actions]
    off = goal[:, None] - q[..., None]
    tau = (jnp.arange(32) + 0.5) / 32
    weight = jnp.abs(tau[:, None] - (off < 0))
    return (weight * optax.huber_loss(off)).sum(1).mean(), {
        "mean": q.mean(-1),
        "spread": q[:, 24] - q[:, 8],
    }


@program(
    lambda d: (
        d.layers(8, 64, 5),
        d.normal(21, 6, 8),
        d.integers(4, 20, 6),
        d.normal(20, 6, scale=0.2) - 1.4,
        d.normal(20, 6),
    ),
    aux=True,
)
def impala_vtrace(params, obs, actions, behaviour, rewards):
    """Off-policy corrections by clipped ratios, backwards in a scan."""
    out = mlp(params, obs, jnp.tanh)
    logits, values = jax.nn.log_softmax(out[:-1, :, :4]), out[..., 4]
    logp = jnp.take_along_axis(logits, actions[..., None], -1)[..., 0]
    rho = jnp.minimum(jnp.exp(lax.stop_gradient(logp) - behaviour), 1.0)
    v = lax.stop_gradient(values)
    delta = rho * (rewards + 0.99 * v[1:] - v[:-1])

    def step(acc, inputs):
        delta, c = inputs
        acc = delta + 0.99 * c * acc
        return acc, acc

    _, off = lax.scan(step, jnp.zeros(6), (delta, rho), reverse=True)
    vs = v[:-1] + off
    adv = rho * (rewards + 0.99 * jnp.append(vs[1:], v[-1:], 0) - v[:-1])
    entropy = -(jnp.exp(logits) * logits).sum(-1).mean()
    loss = -(logp * adv).mean() + 0.5 * jnp.mean((values[:-1] - vs) ** 2) - 0.01 * entropy
    return loss, {"vs": vs, "rho": rho}


def _symlog(x):
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


@program(
    lambda d: (
        {
            "cell": (d.weight(20, 96), d.weight(32, 96), d.normal(96, scale=0.1)),
            "prior": d.layers(32, 16),
            "post": d.layers(44, 16),
            "reward": d.layers(48, 32, 1),
            "obs": d.layers(48, 32, 12),
        },
        d.normal(15, 4, 12, scale=40),
        d.normal(15, 4, 4),
        d.normal(15, 4, scale=100),
        d.normal(15, 4, 16),
    ),
    aux=True,
)
def world_model(params, obs, actions, rewards, gumbel):
    """A recurrent state-space model: balanced KL of categoricals, symlog targets."""

    def step(carry, inputs):
        h, z = carry
        o, a, g = inputs
        h = gru(params["cell"], h, jnp.concatenate([z, a], -1))
        prior = jax.nn.log_softmax(mlp(params["prior"], h).reshape(4, 4, 4))
        post = jax.nn.log_softmax(
            mlp(params["post"], jnp.concatenate([h, _symlog(o)], -1)).reshape(4, 4, 4)
        )
        hard = jax.nn.one_hot((post + g.reshape(4, 4, 4)).argmax(-1), 4)
        z = (hard + jnp.exp(post) - lax.stop_gradient(jnp.exp(post))).reshape(4, 16)
        return (h, z), (h, z, prior, post)

    start = jnp.zeros((4, 32)), jnp.zeros((4, 16))
    _, (h, z, prior, post) = lax.scan(step, start, (obs, actions, gumbel))
    feature = jnp.concatenate([h, z], -1)
    reward = mlp(params["reward"], feature, jax.nn.silu)[..., 0]
    recon = mlp(params["obs"], feature, jax.nn.silu)
    kl = lambda p, q: (jnp.exp(p) * (p - q)).sum((-1, -2)).mean()
    stop = lax.stop_gradient
    dyn, rep = jnp.maximum(kl(stop(post), prior), 0.1), jnp.maximum(kl(post, stop(prior)), 0.1)
    loss = jnp.mean((reward - _symlog(rewards)) ** 2) + jnp.mean((recon - _symlog(obs)) ** 2)
    predicted = jnp.sign(reward) * jnp.expm1(jnp.abs(reward))
    return loss + 0.5 * dyn + 0.1 * rep, {"kl": dyn, "reward": predicted, "h": h}


@program(
    lambda d: (
        {
            "repr": d.layers(12, 48, 32),
            "dyn": d.layers(36, 48, 32),
            "value": d.layers(32, 32, 21),
            "policy": d.layers(32, 32, 4),
        },
        d.normal(8, 12),
        d.integers(4, 5, 8),
        d.normal(6, 8, scale=30),
        jnp.abs(d.normal(6, 8, 4)) / 4,
    ),
    aux=True,
)
def muzero(params, obs, actions, returns, visits):
    """A learned model unrolled five times, scaled hidden states, values on a support of 21."""

    def scale(h):
        low, high = h.min(-1, keepdims=True), h.max(-1, keepdims=True)
        return (h - low) / (high - low + 1e-5)

    support = jnp.linspace(-10, 10, 21)
    h, loss, values = scale(mlp(params["repr"], obs)), 0.0, []
    for k in range(6):
        value = jax.nn.log_softmax(mlp(params["value"], h))
        x = jnp.sign(returns[k]) * (jnp.sqrt(jnp.abs(returns[k]) + 1) - 1)
        goal = jnp.clip(1 - jnp.abs(jnp.clip(x, -10, 10)[:, None] - support), 0, 1)
        share = visits[k] / visits[k].sum(-1, keepdims=True)
        loss -= (goal * value).sum(-1).mean() + (
            share * jax.nn.log_softmax(mlp(params["policy"], h))
        ).sum(-1).mean()
        values.append((jnp.exp(value) * support).sum(-1))
        if k < 5:
            h = scale(mlp(params["dyn"], jnp.concatenate([h, jax.nn.one_hot(actions[k], 4)], -1)))
            h = 0.5 * h + 0.5 * lax.stop_gradient(h)
    return loss / 6, {"values": jnp.stack(values)}


@program(
    lambda d: (
        (d.layers(3, 32), d.layers(8, 32), d.layers(1, 32), d.weight(32, 96), d.layers(32, 64, 3)),
        d.normal(4, 10, 1, scale=300) + 3600,
        d.normal(4, 10, 8),
        d.normal(4, 10, 3),
    ),
    aux=True,
)
def decision_transformer(params, returns, states, actions):
    """Returns to go of some thousands, states and actions as one sequence."""
    ea, es, er, qkv, head = params
    tokens = [mlp(er, returns / 1000.0), mlp(es, states), mlp(ea, actions)]
    x = layer_norm(jnp.stack(tokens, 2).reshape(4, 30, 32))
    x = x + attend(*jnp.split(layer_norm(x) @ qkv, 3, -1), causal(30))
    predicted = jnp.tanh(mlp(head, layer_norm(x), jax.nn.gelu))[:, 1::3]
    return jnp.mean((predicted - jnp.tanh(actions)) ** 2), predicted


@program(
    lambda d: (d.layers(6, 64, 4), d.normal(4), d.normal(64, 12, 2), d.normal(12, 2, scale=0.1)),
    forward=True,
)
def path_integral_control(params, state, noise, plan):
    """MPPI: rollouts of a learned model, weighted by the exponential of their cost."""
    actions = plan + 0.5 * noise

    def step(carry, a):
        x, cost = carry
        x = x + 0.1 * mlp(params, jnp.concatenate([x, a], -1), jnp.tanh)
        cost = cost + 50.0 * ((x[:, :2] - 1.0) ** 2).sum(-1) + 0.1 * (a**2).sum(-1)
        return (x, cost), None

    start = jnp.broadcast_to(state, (64, 4)), jnp.zeros(64)
    (_, cost), _ = lax.scan(step, start, actions.swapaxes(0, 1))
    weights = jax.nn.softmax(-(cost - cost.min()) / 40.0)
    return jnp.einsum("n,ntd->td", weights, actions), cost


@program(
    lambda d: (
        (d.layers(12, 64, 1), d.layers(12, 64, 1)),
        d.normal(32, 9),
        d.normal(32, 3),
        d.normal(32, 8, 3),
        d.normal(32, scale=10) + 150,
    ),
    aux=True,
)
def conservative_q(params, obs, actions, sampled, goal):
    """Q values near 150 with a penalty of their log-sum over sampled actions."""

    def q(layers, a):
        o = jnp.broadcast_to(obs[:, None], (*a.shape[:2], 9))
        return 150.0 + 20.0 * mlp(layers, jnp.concatenate([o, a], -1))[..., 0]

    loss, gaps = 0.0, []
    for layers in params:
        data = q(layers, actions[:, None])[:, 0]
        everything = q(layers, sampled)
        gap = jax.nn.logsumexp(everything, -1) - data
        loss += 0.5 * jnp.mean((data - goal) ** 2) + gap.mean()
        gaps.append(gap)
    return loss / 100.0, {"gaps": jnp.stack(gaps)}


@program(
    lambda d: (
        (d.layers(9, 64, 4), d.layers(9, 64, 1)),
        d.normal(64, 9),
        d.integers(4, 64),
        d.normal(64, scale=30) + 200,
    ),
    aux=True,
)
def advantage_weighted(params, obs, actions, returns):
    """Actions are imitated by the exponential of their advantage over a learned value."""
    policy, critic = params
    value = 200.0 + 30.0 * mlp(critic, obs)[:, 0]
    adv = returns - value
    weights = jnp.minimum(jnp.exp(lax.stop_gradient(adv) / 30.0), 20.0)
    logp = jax.nn.log_softmax(mlp(policy, obs))[jnp.arange(64), actions]
    return -(weights * logp).mean() + jnp.mean(adv**2) / 900.0, {
        "advantages": adv,
        "weights": weights,
    }
