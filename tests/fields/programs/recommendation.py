"""Recommendation and ranking."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from tests.fields.layers import attend, causal, layer_norm, mlp
from tests.fields.registry import program


@program(
    lambda d: (
        {"user": d.layers(24, 48, 32), "item": d.layers(16, 48, 32)},
        d.normal(48, 24),
        d.normal(48, 16),
        d.uniform(48, low=1e-6, high=1e-3),
    ),
    aux=True,
)
def two_towers(params, users, items, frequency):
    """In-batch softmax at temperature 0.05, corrected by the log of the items' frequency."""
    unit = lambda x: x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-12)
    u, v = unit(mlp(params["user"], users)), unit(mlp(params["item"], items))
    logits = u @ v.T / 0.05 - jnp.log(frequency)
    loss = -jnp.diag(jax.nn.log_softmax(logits)).mean()
    rank = (logits > jnp.diag(logits)[:, None]).sum(-1)
    return loss, {"rank": rank, "similarity": (u * v).sum(-1)}


@program(
    lambda d: (
        {
            "tables": d.normal(4, 50, 16, scale=0.3),
            "bottom": d.layers(6, 32, 16),
            "top": d.layers(26, 32, 1),
        },
        jnp.exp(d.normal(32, 6, scale=3)),
        d.integers(50, 4, 32, 3),
        d.mask(32).astype("f"),
    )
)
def click_model(params, dense, sparse, clicks):
    """DLRM: log counts, bags of embeddings, dot products of all pairs."""
    bags = [table[index].sum(1) for table, index in zip(params["tables"], sparse, strict=True)]
    bottom = jax.nn.relu(mlp(params["bottom"], jnp.log1p(dense)))
    features = jnp.stack([bottom, *bags], 1)
    pairs = features @ features.swapaxes(1, 2)
    i, j = jnp.tril_indices(5, -1)
    logits = mlp(params["top"], jnp.concatenate([bottom, pairs[:, i, j]], -1))[:, 0]
    return optax.sigmoid_binary_cross_entropy(logits, clicks).mean()


@program(
    lambda d: (
        {
            "items": d.normal(60, 32, scale=0.2),
            "place": d.normal(20, 32, scale=0.1),
            "qkv": d.weight(32, 96),
            "ff": d.layers(32, 64, 32),
        },
        d.integers(60, 6, 20),
        d.times(6, 20, start=1.7e9, step=86400.0),
        d.integers(60, 6, 20),
    )
)
def sequential_recommender(params, items, seconds, negative):
    """Self-attention over items with the log of the gaps between Unix time stamps."""
    gap = jnp.log1p(jnp.diff(seconds, axis=1, prepend=seconds[:, :1]) / 3600.0)
    x = params["items"][items] * jnp.sqrt(32.0) + params["place"] + 0.01 * gap[..., None]
    q, k, v = jnp.split(layer_norm(x) @ params["qkv"], 3, -1)
    x = x + attend(q, k, v, causal(20))
    x = layer_norm(x + mlp(params["ff"], layer_norm(x)))[:, :-1]
    good = (x * params["items"][items[:, 1:]]).sum(-1)
    bad = (x * params["items"][negative[:, 1:]]).sum(-1)
    return (jax.nn.softplus(-good) + jax.nn.softplus(bad)).mean()


@program(
    lambda d: (
        {
            "user": d.normal(40, 16, scale=0.3),
            "item": d.normal(60, 16, scale=0.3),
            "bu": d.normal(40, scale=0.3),
            "bi": d.normal(60, scale=0.3),
            "mix": d.layers(32, 32, 1),
        },
        d.integers(40, 80),
        d.integers(60, 80),
        d.uniform(80, low=0.5, high=5),
    ),
    aux=True,
)
def rating_prediction(params, user, item, stars):
    """Ratings with their mean, biases, factors and a network for the rest."""
    u, v = params["user"][user], params["item"][item]
    predicted = 3.53 + params["bu"][user] + params["bi"][item] + (u * v).sum(-1)
    predicted = predicted + 0.3 * mlp(params["mix"], jnp.concatenate([u, v], -1))[:, 0]
    error = predicted - stars
    return jnp.mean(error**2) + 0.02 * ((u**2).mean() + (v**2).mean()), {
        "rmse": jnp.sqrt(jnp.mean(error**2)),
        "predicted": jnp.clip(predicted, 0.5, 5.0),
    }


@program(
    lambda d: (
        {
            "v": d.normal(100, 8, scale=0.2),
            "w": d.normal(100, scale=0.1),
            "deep": d.layers(80, 48, 1),
        },
        d.integers(100, 32, 10),
        d.mask(32).astype("f"),
    )
)
def deep_factorization_machine(params, features, clicks):
    """Pairwise interactions as the square of a sum less the sum of squares, beside a network."""
    v = params["v"][features]
    pairs = 0.5 * (v.sum(1) ** 2 - (v**2).sum(1)).sum(-1)
    logits = params["w"][features].sum(1) + pairs + mlp(params["deep"], v.reshape(32, 80))[:, 0]
    return optax.sigmoid_binary_cross_entropy(logits, clicks).mean()


@program(
    lambda d: (d.layers(12, 32, 8), d.normal(200, 12), d.normal(200), d.normal(16, 12)),
    forward=True,
)
def linear_bandit(params, contexts, rewards, candidates):
    """Upper confidence bounds over learned features."""
    phi, new = mlp(params, contexts, jnp.tanh), mlp(params, candidates, jnp.tanh)
    a = phi.T @ phi + jnp.eye(8)
    theta = jnp.linalg.solve(a, phi.T @ rewards)
    width = jnp.sqrt((new * jnp.linalg.solve(a, new.T).T).sum(-1))
    return new @ theta + 0.5 * width, width


@program(lambda d: (d.layers(20, 48, 1), d.normal(12, 30, 20), d.integers(5, 12, 30)), aux=True)
def lambda_rank(params, documents, relevance):
    """Pairs of documents, weighted by the change of the discounted gain."""
    s = mlp(params, documents)[..., 0]
    rank = (s[:, None] > s[..., None]).sum(-1) + 1.0
    discount, gain = 1 / jnp.log2(1 + rank), 2.0**relevance - 1
    delta = jnp.abs((gain[..., None] - gain[:, None]) * (discount[..., None] - discount[:, None]))
    better = relevance[..., None] > relevance[:, None]
    pair = jax.nn.softplus(-(s[..., None] - s[:, None]))
    return (better * jax.lax.stop_gradient(delta) * pair).sum((1, 2)).mean() / 100, {
        "ndcg": (gain * discount).sum(-1)
    }


@program(
    lambda d: (
        {"share": d.layers(20, 48, 32), "ctr": d.layers(32, 1), "cvr": d.layers(32, 1)},
        d.normal(64, 20),
        d.mask(64).astype("f"),
        d.mask(64).astype("f"),
    ),
    aux=True,
)
def entire_space_conversion(params, x, click, buy):
    """The probability of buying as a product of two; small base rates."""
    h = jax.nn.relu(mlp(params["share"], x))
    ctr = jax.nn.sigmoid(mlp(params["ctr"], h)[:, 0] - 3.0)
    cvr = jax.nn.sigmoid(mlp(params["cvr"], h)[:, 0] - 4.0)
    both = ctr * cvr
    bce = lambda p, y: -(y * jnp.log(p + 1e-7) + (1 - y) * jnp.log1p(-p)).mean()
    return bce(ctr, click) + bce(both, buy * click), {"ctr": ctr, "ctcvr": both}
