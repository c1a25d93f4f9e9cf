"""A language model of mixtures of experts: each token goes to two of them."""

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
CHOSEN = 2


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes of the network; an expert has places for twice its share of the tokens."""

    layers: int
    width: int
    experts: int
    length: int
    batch: int
    vocabulary: int

    @property
    def places(self) -> int:
        """How many tokens an expert takes."""
        return 2 * CHOSEN * self.length * self.batch // self.experts


FULL = Config(layers=2, width=512, experts=8, length=256, batch=8, vocabulary=8192)
SMALL = Config(layers=2, width=32, experts=4, length=16, batch=8, vocabulary=128)


def init(config: Config, key: jax.Array) -> dict[str, Any]:
    """Parameters in float32."""
    width, experts = config.width, config.experts
    normal = weights(key, 3 * config.layers + 2)
    layers = [
        {
            "scale": jnp.ones(width),
            "router": normal(width, experts),
            "grow": normal(experts, width, 4 * width),
            "shrink": normal(experts, 4 * width, width),
        }
        for _ in range(config.layers)
    ]
    tokens = normal(config.vocabulary, width, added=1)
    return {"tokens": tokens, "layers": layers, "head": normal(width, config.vocabulary)}


def routes(gates: jax.Array, places: int) -> tuple[jax.Array, jax.Array]:
    """Which token goes to which place of which expert, and what part of the result is its.

    Both are [tokens, experts, places] (Lepikhin et al. 2020); a token beyond the places is dropped.
    """
    parts, chosen = jax.lax.top_k(gates, CHOSEN)
    parts = parts / parts.sum(-1, keepdims=True)
    to_expert = jax.nn.one_hot(chosen, gates.shape[-1], dtype=jnp.float32)
    before = jnp.cumsum(to_expert.reshape(-1, gates.shape[-1]), axis=0).reshape(to_expert.shape)
    place = jnp.sum(before * to_expert, axis=-1).astype(int) - 1
    mask = to_expert[..., None] * jax.nn.one_hot(place, places, dtype=jnp.float32)[..., None, :]
    return mask.sum(1), (mask * parts[..., None, None]).sum(1)


# As a user writes it.


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def loss(places: int, params: dict[str, Any], tokens: jax.Array) -> tuple[jax.Array, None]:
    x = params["tokens"][tokens[:, :-1].ravel()]
    for p in params["layers"]:
        h = norm(x, p["scale"])
        dispatch, combine = routes(jax.nn.softmax(h @ p["router"]), places)
        taken = jnp.einsum("tep,tw->epw", dispatch, h)
        hidden = jax.nn.gelu(jnp.einsum("epw,ewf->epf", taken, p["grow"]))
        x = x + jnp.einsum("tep,epf,efw->tw", combine, hidden, p["shrink"])
    return losses(lambda x: x @ params["head"], x, tokens[:, 1:].ravel()).mean(), None


# As an expert writes it: statistics and gates in float32, all else in bfloat16.


def hand_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return norm(x.astype(jnp.float32), scale).astype(LOW)


def hand_loss(places: int, params: dict[str, Any], tokens: jax.Array) -> tuple[jax.Array, None]:
    x = params["tokens"][tokens[:, :-1].ravel()].astype(LOW)
    for p in params["layers"]:
        h = hand_norm(x, p["scale"])
        scores = (h @ p["router"].astype(LOW)).astype(jnp.float32)
        dispatch, combine = (m.astype(LOW) for m in routes(jax.nn.softmax(scores), places))
        taken = jnp.einsum("tep,tw->epw", dispatch, h)
        hidden = jax.nn.gelu(jnp.einsum("epw,ewf->epf", taken, p["grow"].astype(LOW)))
        x = x + jnp.einsum("tep,epf,efw->tw", combine, hidden, p["shrink"].astype(LOW))
    head = params["head"].astype(LOW)
    return losses(lambda x: x @ head, x, tokens[:, 1:].ravel()).mean(), None


def _size(config: Config) -> Size:
    size = Size(
        init=partial(init, config),
        sample=lambda key: chain_of_tokens(key, config.batch, config.length + 1, config.vocabulary),
        plain=partial(loss, config.places),
        hands={HAND: partial(hand_loss, config.places)},
    )
    return chunked(size)


EXPERTS = Model("experts", "two layers of experts", _size(FULL), _size(SMALL))
