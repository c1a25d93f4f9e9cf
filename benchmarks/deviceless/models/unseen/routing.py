"""Arrays that are gathered and scattered: experts by ragged products, wide tables, a graph network.

See: Gale et al. 2022, arXiv:2211.15841; Naumov et al. 2019, arXiv:1906.00091; Pfaff et al. 2021,
arXiv:2010.03409.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.deviceless.models.heads import chunked, losses
from benchmarks.deviceless.models.model import (
    Config,
    Model,
    Size,
    chain_of_tokens,
    weights,
)
from benchmarks.deviceless.models.unseen.parts import (
    LOW,
    SUMS,
    Attend,
    attending,
    dense,
    flat,
    heads,
    layer_norm,
    linear,
    norm_params,
    rms_norm,
    size,
    wide,
)

EXPERTS, CHOSEN = 8, 2


# A mixture of experts without places: tokens sorted by expert, products of ragged groups.


def ragged_init(config: Config, key: jax.Array) -> Any:
    width, hidden = config.width, 2 * config.width
    draw = weights(key, 6 * config.layers + 2)
    layers = [
        {
            "norm1": jnp.ones(width),
            "qkv": linear(draw, width, 3 * width, bias=False),
            "out": linear(draw, width, width, bias=False),
            "norm2": jnp.ones(width),
            "router": draw(width, EXPERTS),
            "gate": draw(EXPERTS, width, hidden),
            "grow": draw(EXPERTS, width, hidden),
            "shrink": draw(EXPERTS, hidden, width),
        }
        for _ in range(config.layers)
    ]
    head = draw(width, config.vocabulary)
    return {"tokens": draw(config.vocabulary, width, added=1), "layers": layers, "head": head}


def experts(p: Any, x: jax.Array) -> jax.Array:
    """Send each row of [T, C] to its experts and add up what they answer."""
    chances = jax.nn.softmax(wide(x @ p["router"].astype(x.dtype)))
    parts, chosen = jax.lax.top_k(chances, CHOSEN)
    parts = (parts / parts.sum(-1, keepdims=True)).astype(x.dtype)
    order = jnp.argsort(chosen.ravel())
    groups = jnp.bincount(chosen.ravel(), length=EXPERTS)
    taken = x[order // CHOSEN]
    gate, grow, shrink = (p[name].astype(x.dtype) for name in ("gate", "grow", "shrink"))
    hidden = jax.nn.silu(jax.lax.ragged_dot(taken, gate, groups))
    hidden = hidden * jax.lax.ragged_dot(taken, grow, groups)
    answers = jax.lax.ragged_dot(hidden, shrink, groups)[jnp.argsort(order)]
    return jnp.einsum("tkw,tk->tw", answers.reshape(-1, CHOSEN, x.shape[-1]), parts)


def ragged_loss(config: Config, dtype: Any, attend: Attend, params: Any, tokens: jax.Array) -> Any:
    x = params["tokens"][tokens[:, :-1]].astype(dtype)
    for p in params["layers"]:
        qkv = dense(p["qkv"], rms_norm(p["norm1"], x))
        q, k, v = (heads(y, config.width // config.heads) for y in jnp.split(qkv, 3, -1))
        x = x + dense(p["out"], flat(attend(q, k, v, causal=True)))
        y = rms_norm(p["norm2"], x).reshape(-1, config.width)
        x = x + experts(p, y).reshape(x.shape)
    head = params["head"].astype(dtype)
    return losses(lambda x: x @ head, x, tokens[:, 1:]).mean(), None


def _ragged(config: Config) -> Size:
    def sample(key: jax.Array) -> jax.Array:
        return chain_of_tokens(key, config.batch, config.length + 1, config.vocabulary)

    return chunked(attending(partial(ragged_init, config), sample, partial(ragged_loss, config)))


RAGGED = Model(
    "ragged",
    "a mixture of experts by ragged products",
    _ragged(Config(layers=2, width=1024, heads=16, length=1024, batch=4, vocabulary=8192)),
    _ragged(Config(layers=2, width=64, heads=2, length=32, batch=4, vocabulary=128)),
)


# A recommender: rows of wide tables, products of all pairs, a perceptron.


def recommender_init(tables: int, rows: int, width: int, key: jax.Array) -> Any:
    draw = weights(key, tables + 6)
    pairs = (tables + 1) * tables // 2
    return {
        "tables": [draw(rows, width, added=width) for _ in range(tables)],
        "bottom": [linear(draw, 13, 512), linear(draw, 512, 256), linear(draw, 256, width)],
        "top": [linear(draw, pairs + width, 1024), linear(draw, 1024, 512), linear(draw, 512, 1)],
    }


def recommender_loss(dtype: Any, params: Any, batch: Any) -> Any:
    numbers, places, clicked = batch
    x = numbers.astype(dtype)
    for p in params["bottom"]:
        x = jax.nn.relu(dense(p, x))
    rows = [t[places[:, i]].astype(dtype) for i, t in enumerate(params["tables"])]
    all_rows = jnp.stack([x, *rows], 1)
    pairs = jnp.einsum("bic,bjc->bij", all_rows, all_rows)
    below = jnp.tril_indices(all_rows.shape[1], -1)
    x = jnp.concatenate([x, pairs[:, below[0], below[1]]], -1)
    for p in params["top"][:-1]:
        x = jax.nn.relu(dense(p, x))
    logit = wide(dense(params["top"][-1], x))[:, 0]
    return jnp.mean(jax.nn.softplus(logit) - clicked * logit), None


def _recommender(tables: int, rows: int, width: int, batch: int) -> Size:
    def sample(key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        numbers = jax.random.normal(keys[0], (batch, 13))
        places = jax.random.randint(keys[1], (batch, tables), 0, rows)
        return numbers, places, jax.random.bernoulli(keys[2], 0.3, (batch,)).astype(jnp.float32)

    return size(partial(recommender_init, tables, rows, width), sample, recommender_loss)


RECOMMENDER = Model(
    "recommender",
    "a recommender of wide tables",
    _recommender(tables=12, rows=100_000, width=64, batch=16384),
    _recommender(tables=3, rows=100, width=16, batch=64),
)


# A graph network of a mesh: messages along edges, sums over what arrives.


def perceptron(draw: Any, inputs: int, width: int) -> Any:
    layers = [linear(draw, inputs, width), linear(draw, width, width)]
    return {"layers": layers, "norm": norm_params(width)}


def graph_init(steps: int, width: int, key: jax.Array) -> Any:
    draw = weights(key, 4 * steps + 6)
    return {
        "nodes": perceptron(draw, 12, width),
        "edges": perceptron(draw, 4, width),
        "steps": [
            {"edge": perceptron(draw, 3 * width, width), "node": perceptron(draw, 2 * width, width)}
            for _ in range(steps)
        ],
        "head": linear(draw, width, 3),
    }


def apply_perceptron(p: Any, x: jax.Array) -> jax.Array:
    first, second = p["layers"]
    return layer_norm(p["norm"], dense(second, jax.nn.relu(dense(first, x))))


def rows(nodes: jax.Array, places: jax.Array) -> jax.Array:
    return nodes[places]


def rows_of_float32(nodes: jax.Array, places: jax.Array) -> jax.Array:
    return wide(nodes)[places].astype(nodes.dtype)


def graph_loss(dtype: Any, params: Any, batch: Any, rows: Any = rows) -> Any:
    nodes, edges, senders, receivers, target = batch
    nodes = apply_perceptron(params["nodes"], nodes.astype(dtype))
    edges = apply_perceptron(params["edges"], edges.astype(dtype))
    for p in params["steps"]:
        ends = [edges, rows(nodes, senders), rows(nodes, receivers)]
        edges = edges + apply_perceptron(p["edge"], jnp.concatenate(ends, -1))
        arrived = jax.ops.segment_sum(wide(edges), receivers, len(nodes)).astype(dtype)
        nodes = nodes + apply_perceptron(p["node"], jnp.concatenate([nodes, arrived], -1))
    return jnp.mean((wide(dense(params["head"], nodes)) - target) ** 2), None


def _graph(steps: int, width: int, nodes: int, edges: int) -> Size:
    def sample(key: jax.Array) -> Any:
        keys = jax.random.split(key, 5)
        senders, receivers = (jax.random.randint(k, (edges,), 0, nodes) for k in keys[2:4])
        return (
            jax.random.normal(keys[0], (nodes, 12)),
            jax.random.normal(keys[1], (edges, 4)),
            senders,
            receivers,
            jax.random.normal(keys[4], (nodes, 3)),
        )

    found = size(partial(graph_init, steps, width), sample, graph_loss)
    summing = partial(graph_loss, LOW, rows=rows_of_float32)
    return replace(found, hands=found.hands | {SUMS: summing})


GRAPH = Model(
    "graph",
    "a graph network by segments",
    _graph(steps=4, width=128, nodes=16384, edges=98304),
    _graph(steps=2, width=16, nodes=64, edges=256),
)
