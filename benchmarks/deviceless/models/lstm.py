"""A language model of LSTM layers, each a scan over time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.deviceless.models.heads import chunked, losses
from benchmarks.deviceless.models.model import (
    HAND,
    Model,
    Size,
    chain_of_tokens,
    weights,
)

LOW = jnp.bfloat16


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes of the network."""

    layers: int
    width: int
    length: int
    batch: int
    vocabulary: int


FULL = Config(layers=2, width=1024, length=128, batch=64, vocabulary=8192)
SMALL = Config(layers=2, width=64, length=32, batch=16, vocabulary=128)


def init(config: Config, key: jax.Array) -> dict[str, Any]:
    """Parameters in float32."""
    width = config.width
    normal = weights(key, 2 * config.layers + 2)
    layers = [
        {
            "input": normal(width, 4 * width),
            "hidden": normal(width, 4 * width),
            "bias": jnp.zeros(4 * width),
        }
        for _ in range(config.layers)
    ]
    tokens = normal(config.vocabulary, width, added=1)
    return {"tokens": tokens, "layers": layers, "head": normal(width, config.vocabulary)}


# As a user writes it; the input's projection does not wait for the recurrence.


def layer(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """From inputs to hidden states, both [time, batch, width]."""

    def step(state: tuple[jax.Array, jax.Array], projected: jax.Array) -> Any:
        h, c = state
        i, f, g, o = jnp.split(projected + h @ p["hidden"], 4, axis=-1)
        c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros_like(x[0])
    return jax.lax.scan(step, (zeros, zeros), x @ p["input"] + p["bias"])[1]


def loss(params: dict[str, Any], tokens: jax.Array) -> tuple[jax.Array, None]:
    inputs, labels = tokens.T[:-1], tokens.T[1:]
    x = params["tokens"][inputs]
    for p in params["layers"]:
        x = layer(p, x)
    return losses(lambda x: x @ params["head"], x, labels).mean(), None


# As an expert writes it: hidden states and gates in bfloat16, the cell in float32 or in bfloat16.
# The weight is cast inside the step, so that its gradient is summed over time in float32.


def hand_layer(cell: Any, p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    def step(state: tuple[jax.Array, jax.Array], projected: jax.Array) -> Any:
        h, c = state
        i, f, g, o = jnp.split(projected + h @ p["hidden"].astype(LOW), 4, axis=-1)
        forget, candidate = jax.nn.sigmoid(f + 1.0), jax.nn.sigmoid(i) * jnp.tanh(g)
        c = forget.astype(cell) * c + candidate.astype(cell)
        h = jax.nn.sigmoid(o) * jnp.tanh(c.astype(LOW))
        return (h, c), h

    zeros = jnp.zeros_like(x[0])
    projected = x @ p["input"].astype(LOW) + p["bias"].astype(LOW)
    return jax.lax.scan(step, (zeros, zeros.astype(cell)), projected)[1]


def hand_loss(cell: Any, params: dict[str, Any], tokens: jax.Array) -> tuple[jax.Array, None]:
    inputs, labels = tokens.T[:-1], tokens.T[1:]
    x = params["tokens"][inputs].astype(LOW)
    for p in params["layers"]:
        x = hand_layer(cell, p, x)
    head = params["head"].astype(LOW)
    return losses(lambda x: x @ head, x, labels).mean(), None


def _size(config: Config) -> Size:
    size = Size(
        init=partial(init, config),
        sample=lambda key: chain_of_tokens(key, config.batch, config.length + 1, config.vocabulary),
        plain=loss,
        hands={
            HAND: partial(hand_loss, jnp.float32),
            "hand, bf16 cell": partial(hand_loss, LOW),
        },
    )
    return chunked(size)


LSTM = Model("lstm", "two LSTM layers by scan", _size(FULL), _size(SMALL))
