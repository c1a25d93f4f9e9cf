"""A recurrent decoder that attends to all tokens of a source in every turn."""

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
    """The sizes of the network; the source is as long as what is decoded."""

    width: int
    length: int
    batch: int
    vocabulary: int


FULL = Config(width=1024, length=128, batch=64, vocabulary=8192)
SMALL = Config(width=64, length=32, batch=16, vocabulary=128)
SQUARES = ("encode", "key", "query", "context", "input", "state")


def init(config: Config, key: jax.Array) -> dict[str, Any]:
    """Parameters in float32."""
    width = config.width
    normal = weights(key, len(SQUARES) + 3)
    tokens = normal(config.vocabulary, width, added=1)
    squares = {name: normal(width, width) for name in SQUARES}
    return {"tokens": tokens, **squares, "score": normal(width), "head": normal(width, len(tokens))}


# As a user writes it (Bahdanau, Cho and Bengio 2015, with one layer and no recurrent encoder).


def loss(params: dict[str, Any], tokens: jax.Array) -> tuple[jax.Array, None]:
    x = params["tokens"][tokens[:, :-1]]
    memory = jnp.tanh(x @ params["encode"])
    keys = memory @ params["key"]

    def step(state: jax.Array, projected: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jnp.tanh(keys + (state @ params["query"])[:, None]) @ params["score"]
        context = jnp.einsum("bt,btw->bw", jax.nn.softmax(scores), memory)
        state = jnp.tanh(projected + context @ params["context"] + state @ params["state"])
        return state, state

    projected = (x @ params["input"]).swapaxes(0, 1)
    _, states = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), projected)
    return losses(lambda x: x @ params["head"], states, tokens.T[1:]).mean(), None


# As an expert writes it: all in bfloat16, the softmax in float32. What the turns share is in
# bfloat16 as well, and then its cotangent is added up over them in bfloat16; or it is in float32
# and cast in each turn.


def hand_loss(shared: Any, params: dict[str, Any], tokens: jax.Array) -> tuple[jax.Array, None]:
    low = {name: params[name].astype(LOW) for name in ("encode", "key", "input", "head")}
    x = params["tokens"][tokens[:, :-1]].astype(LOW)
    memory = jnp.tanh(x @ low["encode"])
    keys, memory = (memory @ low["key"]).astype(shared), memory.astype(shared)

    def step(state: jax.Array, projected: jax.Array) -> tuple[jax.Array, jax.Array]:
        p = {name: params[name].astype(LOW) for name in ("query", "score", "context", "state")}
        hidden = jnp.tanh(keys.astype(LOW) + (state @ p["query"])[:, None])
        weights = jax.nn.softmax((hidden @ p["score"]).astype(jnp.float32)).astype(LOW)
        context = jnp.einsum("bt,btw->bw", weights, memory.astype(LOW))
        state = jnp.tanh(projected + context @ p["context"] + state @ p["state"])
        return state, state

    projected = (x @ low["input"]).swapaxes(0, 1)
    _, states = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), projected)
    return losses(lambda x: x @ low["head"], states, tokens.T[1:]).mean(), None


def _size(config: Config) -> Size:
    size = Size(
        init=partial(init, config),
        sample=lambda key: chain_of_tokens(key, config.batch, config.length + 1, config.vocabulary),
        plain=loss,
        hands={
            HAND: partial(hand_loss, LOW),
            "hand, sums over turns in f32": partial(hand_loss, jnp.float32),
        },
    )
    return chunked(size)


DECODER = Model("decoder", "a recurrent decoder with attention", _size(FULL), _size(SMALL))
