"""A causal language model of equinox's modules, each written for one word or one sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.deviceless.models import fused
from benchmarks.deviceless.models.fused import FUSED
from benchmarks.deviceless.models.heads import chunked, losses
from benchmarks.deviceless.models.model import (
    HAND,
    Config,
    Model,
    Size,
    chain_of_tokens,
)

LOW = jnp.bfloat16
Attend = Callable[[Any, jax.Array], jax.Array]
"""From a layer's attention and [B, T, C] to the same shape."""


FULL = Config(layers=4, width=768, heads=12, length=1024, batch=8, vocabulary=8192)
SMALL = Config(layers=2, width=64, heads=4, length=32, batch=16, vocabulary=128)


class Layer(eqx.Module):
    """Attention and a perceptron, each after a norm."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, config: Config, key: jax.Array):
        first, second = jax.random.split(key)
        width = config.width
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(config.heads, width, key=first)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=second)


class Network(eqx.Module):
    """Embeddings, layers, a norm and a head."""

    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    layers: list[Layer]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, config: Config, key: jax.Array):
        tokens, positions, head, *layers = jax.random.split(key, 3 + config.layers)
        self.tokens = eqx.nn.Embedding(config.vocabulary, config.width, key=tokens)
        self.positions = eqx.nn.Embedding(config.length, config.width, key=positions)
        self.layers = [Layer(config, k) for k in layers]
        self.norm = eqx.nn.LayerNorm(config.width)
        self.head = eqx.nn.Linear(config.width, config.vocabulary, use_bias=False, key=head)


def words(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Apply a module for one word to all words of all examples."""
    return jax.vmap(jax.vmap(fn))


# As a user writes it.


def attend(attention: eqx.nn.MultiheadAttention, x: jax.Array) -> jax.Array:
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    return jax.vmap(lambda x: attention(x, x, x, mask=causal))(x)


def hidden(attend: Attend, norm: Callable[..., Any], network: Any, tokens: jax.Array) -> jax.Array:
    places = jnp.arange(tokens.shape[1])
    x = words(network.tokens)(tokens) + jax.vmap(network.positions)(places)
    for layer in network.layers:
        x = x + attend(layer.attention, norm(layer.norm1, x))
        x = x + words(layer.mlp)(norm(layer.norm2, x))
    return norm(network.norm, x)


def norm(module: eqx.nn.LayerNorm, x: jax.Array) -> jax.Array:
    return words(module)(x)


# As an expert writes it: parameters of bfloat16 but for those of norms, which compute in float32.


def hand_norm(module: eqx.nn.LayerNorm, x: jax.Array) -> jax.Array:
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), module)
    return words(wide)(x.astype(jnp.float32)).astype(LOW)


def hand_attend(how: Any, attention: eqx.nn.MultiheadAttention, x: jax.Array) -> jax.Array:
    heads = (*x.shape[:2], attention.num_heads, -1)
    projections: Any = (attention.query_proj, attention.key_proj, attention.value_proj)
    q, k, v = (words(project)(x).reshape(heads) for project in projections)
    return words(attention.output_proj)(how(q, k, v, causal=True).reshape(x.shape))


def composed(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")


def _size(config: Config) -> Size:
    @cache
    def structure() -> Any:
        build = partial(Network, config)
        network = eqx.filter_eval_shape(build, jax.random.key(0))
        return eqx.partition(network, lambda x: isinstance(x, jax.ShapeDtypeStruct))[1]

    def init(key: jax.Array) -> Any:
        return eqx.filter(Network(config, key), eqx.is_array)

    def loss(attend: Attend, norm: Any, dtype: Any, params: Any, tokens: jax.Array) -> Any:
        low = jax.tree.map(lambda p: p.astype(dtype or p.dtype), params)
        network: Any = eqx.combine(low, structure())
        x = hidden(attend, norm, network, tokens[:, :-1])
        return losses(words(network.head), x, tokens[:, 1:]).mean(), None

    def hand(how: Any) -> Any:
        return partial(loss, partial(hand_attend, how), hand_norm, LOW)

    size = Size(
        init=init,
        sample=lambda key: chain_of_tokens(key, config.batch, config.length + 1, config.vocabulary),
        plain=partial(loss, attend, norm, None),
        hands={HAND: hand(composed), FUSED: hand(fused.attention)},
    )
    return chunked(size)


EQUINOX = Model("equinox", "a causal model of equinox's modules", _size(FULL), _size(SMALL))
