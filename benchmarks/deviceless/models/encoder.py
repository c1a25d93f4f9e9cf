"""An encoder of flax nnx modules, trained to restore masked words; by hand is their ``dtype``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.deviceless.models import fused
from benchmarks.deviceless.models.fused import FUSED
from benchmarks.deviceless.models.heads import chunked, losses
from benchmarks.deviceless.models.model import HAND, Config, Model, Size, chain_of_tokens

MASKED = 0.15  # of all words; word 0 stands in their place
Attend = Callable[..., jax.Array]


FULL = Config(layers=4, width=768, heads=12, length=1024, batch=8, vocabulary=8192)
SMALL = Config(layers=4, width=64, heads=4, length=32, batch=16, vocabulary=128)


class Layer(nnx.Module):
    """Attention and a perceptron, each before a norm, as in Devlin et al. 2018."""

    def __init__(self, config: Config, dtype: Any, attend: Attend, rngs: nnx.Rngs):
        width = config.width
        words: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.attention = nnx.MultiHeadAttention(
            config.heads, width, decode=False, attention_fn=attend, **words
        )
        self.norm1 = nnx.LayerNorm(width, **words)
        self.grow = nnx.Linear(width, 4 * width, **words)
        self.shrink = nnx.Linear(4 * width, width, **words)
        self.norm2 = nnx.LayerNorm(width, **words)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.shrink(nnx.gelu(self.grow(x))))


class Encoder(nnx.Module):
    """Embeddings of words and positions, and layers; the head is the words' own embedding."""

    def __init__(self, config: Config, dtype: Any, attend: Attend, rngs: nnx.Rngs):
        words: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.words = nnx.Embed(config.vocabulary, config.width, **words)
        self.positions = nnx.Embed(config.length, config.width, **words)
        self.norm = nnx.LayerNorm(config.width, **words)
        layers = [Layer(config, dtype, attend, rngs) for _ in range(config.layers)]
        self.layers = nnx.List(layers)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.words(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x


def fused_attention(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
    return fused.attention(query, key, value, causal=False)


def sample(config: Config, key: jax.Array) -> tuple[jax.Array, ...]:
    """Words with some of them masked, the words themselves, and which are masked."""
    draw, mask = jax.random.split(key)
    words = chain_of_tokens(draw, config.batch, config.length, config.vocabulary)
    masked = jax.random.bernoulli(mask, MASKED, words.shape)
    return jnp.where(masked, 0, words), words, masked


def _size(config: Config) -> Size:
    def init(key: jax.Array) -> Any:
        return nnx.state(Encoder(config, None, nnx.dot_product_attention, nnx.Rngs(key)))

    @cache
    def definition(dtype: Any, attend: Attend) -> Any:
        return nnx.graphdef(nnx.eval_shape(lambda: Encoder(config, dtype, attend, nnx.Rngs(0))))

    def loss(dtype: Any, attend: Attend, params: Any, batch: tuple[jax.Array, ...]) -> Any:
        inputs, words, masked = batch
        network = nnx.merge(definition(dtype, attend), params)
        found = losses(network.words.attend, network(inputs), words)
        return jnp.sum(found * masked) / jnp.sum(masked), None

    def version(dtype: Any = None, attend: Attend = nnx.dot_product_attention) -> Any:
        return partial(loss, dtype, attend)

    size = Size(
        init=init,
        sample=partial(sample, config),
        plain=version(),
        hands={HAND: version(jnp.bfloat16), FUSED: version(jnp.bfloat16, fused_attention)},
    )
    return chunked(size)


ENCODER = Model("encoder", "an encoder of flax nnx, four layers", _size(FULL), _size(SMALL))
