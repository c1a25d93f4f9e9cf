"""Economics, education and society: demand, ability, ratings, effects, growth."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.fields.layers import attend, causal, layer_norm, lstm, mlp
from tests.fields.registry import program


@program(
    lambda d: (
        d.layers(4, 32, 1),
        d.normal(10, 8, 4),
        d.uniform(10, 8, low=0.02, high=0.1),
        d.normal(64, 4),
    ),
    aux=True,
)
def demand_for_products(params, features, shares, tastes):
    """Random-coefficient demand: a contraction finds utilities that give the shares."""
    utility = jnp.einsum("mjk,nk->mnj", features, tastes) * 0.5

    def predicted(delta):
        v = jnp.exp(delta[:, None] + utility)
        return (v / (1 + v.sum(-1, keepdims=True))).mean(1)

    def contract(_, delta):
        return delta + jnp.log(shares) - jnp.log(predicted(delta))

    delta = lax.fori_loop(0, 30, contract, jnp.log(shares))
    delta = lax.stop_gradient(delta)
    linear = mlp(params, features, jax.nn.softplus)[..., 0]
    shock = delta - linear
    moments = jnp.einsum("mj,mjk->k", shock, features) / 80
    return (moments**2).sum() + 0.1 * (shock**2).mean(), {"delta": delta, "shock": shock}


@program(
    lambda d: (
        (
            (d.weight(40, 128), d.weight(32, 128), d.normal(128, scale=0.1)),
            d.layers(32, 20),
        ),
        d.integers(20, 25, 8),
        d.uniform(25, 8),
    ),
    aux=True,
)
def knowledge_tracing(params, question, answer):
    """An LSTM over answers predicts the next, looked up in its output by the question."""
    right = (answer < 0.6).astype("float32")
    hot = jax.nn.one_hot(question, 20)
    x = jnp.concatenate([hot * right[..., None], hot * (1 - right[..., None])], -1)

    def step(state, x):
        h, c = lstm(params[0], state, x)
        return (h, c), h

    zero = jnp.zeros((8, 32))
    _, hs = lax.scan(step, (zero, zero), x)
    logits = mlp(params[1], hs)
    following = jnp.take_along_axis(logits[:-1], question[1:, :, None], -1)[..., 0]
    loss = jnp.mean(jax.nn.softplus(following) - right[1:] * following)
    return loss, {"mastery": jax.nn.sigmoid(logits[-1])}


@program(
    lambda d: (
        {"ability": d.layers(16, 32, 4), "item": d.normal(30, 5, scale=0.5)},
        d.normal(48, 16),
        d.uniform(48, 30),
        d.normal(48, 2),
    ),
    aux=True,
)
def item_response(params, background, answers, noise):
    """Abilities with a Gaussian posterior, difficulties, slopes, guessing; the bound."""
    right = (answers < 0.55).astype("float32")
    mean, logvar = jnp.split(mlp(params["ability"], background, jnp.tanh), 2, -1)
    theta = mean + jnp.exp(0.5 * logvar) * noise
    slope = jnp.exp(params["item"][:, :2])
    difficulty, guess = params["item"][:, 2], 0.3 * jax.nn.sigmoid(params["item"][:, 3])
    p = guess + (1 - guess) * jax.nn.sigmoid(theta @ slope.T - difficulty)
    fit = (right * jnp.log(p + 1e-7) + (1 - right) * jnp.log(1 - p + 1e-7)).sum(-1)
    kl = 0.5 * (mean**2 + jnp.exp(logvar) - 1 - logvar).sum(-1)
    information = (slope**2).sum(-1) * (p * (1 - p)).mean(0)
    return (kl - fit).mean() / 30, {"theta": theta, "information": information}


@program(
    lambda d: (
        d.layers(8, 32, 1),
        d.integers(12, 60, 2),
        d.normal(60, 8),
        d.uniform(60),
    ),
    aux=True,
)
def chess_ratings(params, pairs, context, result):
    """Ratings near 1500 updated game by game, with a learned advantage of the setting."""

    def game(ratings, xs):
        pair, features, score = xs
        a, b = ratings[pair[0]], ratings[pair[1]]
        edge = 35.0 * mlp(params, features, jnp.tanh)[0]
        expected = 1 / (1 + 10 ** (-(a - b + edge) / 400))
        won = (score > 0.5).astype("float32")
        change = 24.0 * (won - expected)
        ratings = ratings.at[pair[0]].add(change).at[pair[1]].add(-change)
        loss = -won * jnp.log(expected) - (1 - won) * jnp.log1p(-expected)
        return ratings, loss

    ratings, loss = lax.scan(game, jnp.full(12, 1500.0), (pairs, context, result))
    return loss.mean(), {"ratings": ratings, "spread": ratings - ratings.mean()}


@program(
    lambda d: (
        {"trunk": d.layers(10, 64, 32), "treat": d.layers(32, 1), "out": d.layers(32, 32, 2)},
        d.normal(96, 10),
        d.uniform(96),
        30000 + d.normal(96, scale=8000.0),
    ),
    aux=True,
)
def treatment_effects(params, covariates, assigned, income):
    """Doubly robust effects on income: propensities, two outcomes, and a targeted correction."""
    treated = (assigned < 0.4).astype("float32")
    h = jax.nn.elu(mlp(params["trunk"], covariates, jax.nn.elu))
    propensity = jnp.clip(jax.nn.sigmoid(mlp(params["treat"], h)[:, 0]), 0.02, 0.98)
    outcome = 30000 + 8000 * mlp(params["out"], h, jax.nn.elu)
    chosen = jnp.where(treated > 0, outcome[:, 1], outcome[:, 0])
    fit = jnp.mean(((income - chosen) / 8000) ** 2)
    cross = -jnp.mean(treated * jnp.log(propensity) + (1 - treated) * jnp.log(1 - propensity))
    clever = treated / propensity - (1 - treated) / (1 - propensity)
    effect = outcome[:, 1] - outcome[:, 0] + clever * (income - chosen)
    return fit + cross, {"effect": effect.mean(), "propensity": propensity}


@program(
    lambda d: (
        d.layers(2, 48, 48, 1),
        d.uniform(64, low=2.0, high=6.0),
        d.normal(64, scale=0.1),
    ),
    aux=True,
)
def optimal_growth(params, capital, shock):
    """Euler's equation of a household: consumption by a network, expectations by quadrature."""
    alpha, beta, gamma, rho, sigma = 0.33, 0.96, 2.0, 0.9, 0.02
    nodes = jnp.array([-2.0202, -0.9586, 0.0, 0.9586, 2.0202]) * 2**0.5
    weights = jnp.array([0.01995, 0.39362, 0.94531, 0.39362, 0.01995]) / jnp.pi**0.5

    def consumption(k, z):
        inputs = jnp.stack([jnp.log(k) - 1.2, z * 10], -1)
        return jax.nn.sigmoid(mlp(params, inputs, jnp.tanh)[..., 0]) * jnp.exp(z) * k**alpha

    c = consumption(capital, shock)
    following = jnp.exp(shock) * capital**alpha + 0.9 * capital - c
    z = rho * shock[:, None] + sigma * nodes
    k = jnp.broadcast_to(following[:, None], z.shape)
    gain = alpha * jnp.exp(z) * k ** (alpha - 1) + 0.9
    expected = ((consumption(k, z) ** -gamma * gain) * weights).sum(-1)
    residual = 1 - (beta * expected) ** (-1 / gamma) / c
    return jnp.mean(residual**2), {"residual": residual, "capital": following}


@program(
    lambda d: (
        [d.weight(50, 32), d.weight(32, 96), d.layers(32, 64, 32), d.weight(32, 50)],
        d.integers(50, 6, 30),
        d.times(6, 30, start=1.6e9, step=3600.0),
    ),
    forward=True,
)
def event_intensities(params, event, clock):
    """A Hawkes transformer on Unix times: encodings of hours, and intensities between events."""
    hours = (clock - clock[:, :1]) / 3600.0
    rates = 10000.0 ** (-jnp.arange(16) / 16)
    angle = hours[..., None] * rates
    h = params[0][event] + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
    q, k, v = jnp.split(layer_norm(h) @ params[1], 3, -1)
    h = h + attend(q, k, v, causal(30))
    h = h + mlp(params[2], layer_norm(h), jax.nn.gelu)
    base = layer_norm(h) @ params[3]
    gap = jnp.diff(hours, axis=1)
    between = base[:, :-1, :] + jnp.linspace(0.0, 1.0, 5)[:, None, None, None] * gap[..., None]
    intensity = jax.nn.softplus(between - 1.0)
    integral = (intensity.sum(-1) * gap).mean(0).sum(-1)
    hit = jnp.take_along_axis(jnp.log(intensity[-1]), event[:, 1:, None], -1)[..., 0].sum(-1)
    return hit - integral, intensity.sum(-1)
