"""Language models of three packages' modules, with the losses that such are trained with.

A Qwen-like decoder of flax nnx, its layers under `nnx.remat`, with a soft cap and a z-loss; a
Mamba-like model of equinox, of which tokens of padding do not count; an encoder and decoder like
BART's of flax linen, whose embedding is its head and whose labels are smoothed by optax. See: Qwen
Team 2025, arXiv:2505.09388; Gu and Dao 2023, arXiv:2312.00752; Lewis et al. 2019, arXiv:1910.13461.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.deviceless.models import fused
from benchmarks.deviceless.models.fused import FUSED
from benchmarks.deviceless.models.heads import chunked, losses
from benchmarks.deviceless.models.model import HAND, Config, Model, Size, chain_of_tokens
from benchmarks.deviceless.models.unseen.parts import LOW, WIDE, composed, flat, heads, wide
from benchmarks.deviceless.models.unseen.words import rotated

CAP, PADDING = 30.0, 0


def sequences(config: Config, key: jax.Array) -> jax.Array:
    return chain_of_tokens(key, config.batch, config.length + 1, config.vocabulary)


# A decoder of nnx modules.


class Attention(nnx.Module):
    """With norms of queries and keys, and a head of keys for every four of queries."""

    def __init__(self, config: Config, dtype: Any, attend: Any, rngs: nnx.Rngs):
        width, self.head, self.attend = config.width, config.width // config.heads, attend
        linear = partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.q, self.out = linear(width, width), linear(width, width)
        self.k, self.v = linear(width, width // 4), linear(width, width // 4)
        self.q_norm, self.k_norm = (nnx.RMSNorm(self.head, dtype=dtype, rngs=rngs) for _ in "qk")

    def __call__(self, x: jax.Array) -> jax.Array:
        places = jnp.arange(x.shape[1])
        q = rotated(self.q_norm(heads(self.q(x), self.head)), places)
        k = rotated(self.k_norm(heads(self.k(x), self.head)), places)
        k, v = (jnp.repeat(y, 4, axis=2) for y in (k, heads(self.v(x), self.head)))
        return self.out(flat(self.attend(q, k, v, causal=True)))


class Block(nnx.Module):
    """Attention and a gated perceptron, each after a norm."""

    def __init__(self, config: Config, dtype: Any, attend: Any, rngs: nnx.Rngs):
        width, inner = config.width, 3 * config.width
        linear = partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.norm1, self.norm2 = (nnx.RMSNorm(width, dtype=dtype, rngs=rngs) for _ in range(2))
        self.attention = Attention(config, dtype, attend, rngs)
        self.gate, self.up, self.down = (
            linear(*sizes) for sizes in ((width, inner), (width, inner), (inner, width))
        )

    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Decoder(nnx.Module):
    """An embedding, layers, a norm and a head."""

    def __init__(self, config: Config, dtype: Any, attend: Any, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.vocabulary, config.width, dtype=dtype, rngs=rngs)
        blocks = [Block(config, dtype, attend, rngs) for _ in range(config.layers)]
        self.blocks, self.norm = nnx.List(blocks), nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(
            config.width, config.vocabulary, use_bias=False, dtype=dtype, rngs=rngs
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def capped_with_z_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = CAP * jnp.tanh(wide(logits) / CAP)
    found = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return found + 1e-4 * jax.nn.logsumexp(logits, axis=-1) ** 2


def _qwen(config: Config) -> Size:
    @cache
    def definition(dtype: Any, attend: Any) -> Any:
        return nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, dtype, attend, nnx.Rngs(0))))

    def loss(dtype: Any, attend: Any, params: Any, tokens: jax.Array) -> Any:
        model = nnx.merge(definition(dtype, attend), params)
        found = losses(model.head, model(tokens[:, :-1]), tokens[:, 1:], capped_with_z_loss)
        return found.mean(), None

    size = Size(
        init=lambda key: nnx.state(Decoder(config, None, composed, nnx.Rngs(key))),
        sample=partial(sequences, config),
        plain=partial(loss, None, composed),
        hands={HAND: partial(loss, LOW, composed), FUSED: partial(loss, LOW, fused.attention)},
    )
    return chunked(size)


# A recurrence of equinox modules, for one sequence.


class Mixer(eqx.Module):
    """Gates that depend on the token, and a state for each number, by an associative scan."""

    enter: eqx.nn.Linear
    taps: eqx.nn.Conv1d
    step: eqx.nn.Linear
    decay: jax.Array
    leave: eqx.nn.Linear

    def __init__(self, width: int, key: jax.Array):
        enter, taps, step, leave = jax.random.split(key, 4)
        self.enter = eqx.nn.Linear(width, 4 * width, use_bias=False, key=enter)
        self.taps = eqx.nn.Conv1d(
            2 * width, 2 * width, 4, padding=[(3, 0)], groups=2 * width, key=taps
        )
        self.step = eqx.nn.Linear(2 * width, 2 * width, key=step)
        self.decay = jnp.linspace(-1.0, 2.0, 2 * width)
        self.leave = eqx.nn.Linear(2 * width, width, use_bias=False, key=leave)

    def __call__(self, x: jax.Array) -> jax.Array:
        y, gate = jnp.split(jax.vmap(self.enter)(x), 2, axis=-1)
        y = jax.nn.silu(self.taps(y.T).T)
        step = jax.nn.softplus(wide(jax.vmap(self.step)(y)))
        kept = jnp.exp(-step * jnp.exp(self.decay))

        def joined(one: Any, other: Any) -> Any:
            return one[0] * other[0], one[1] * other[0] + other[1]

        _, state = jax.lax.associative_scan(joined, (kept, step * wide(y)))
        return jax.vmap(self.leave)(state.astype(x.dtype) * jax.nn.silu(gate))


class Recurrent(eqx.Module):
    """An embedding, mixers after norms, and a head of its own."""

    embed: eqx.nn.Embedding
    mixers: list[Mixer]
    norms: list[eqx.nn.RMSNorm]
    head: eqx.nn.Linear

    def __init__(self, config: Config, key: jax.Array):
        embed, head, *mixers = jax.random.split(key, 2 + config.layers)
        self.embed = eqx.nn.Embedding(config.vocabulary, config.width, key=embed)
        self.mixers = [Mixer(config.width, k) for k in mixers]
        self.norms = [eqx.nn.RMSNorm(config.width) for _ in range(config.layers + 1)]
        self.head = eqx.nn.Linear(config.width, config.vocabulary, use_bias=False, key=head)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(tokens)
        for mixer, norm in zip(self.mixers, self.norms, strict=False):
            x = x + mixer(jax.vmap(norm)(x))
        return jax.vmap(self.norms[-1])(x)


def _mamba(config: Config) -> Size:
    build = partial(Recurrent, config)

    @cache
    def structure() -> Any:
        model = eqx.filter_eval_shape(build, jax.random.key(0))
        return eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))[1]

    def loss(dtype: Any, params: Any, tokens: jax.Array) -> Any:
        low = jax.tree.map(lambda p: p.astype(dtype), params)
        model: Any = eqx.combine(low, structure())
        x, labels = jax.vmap(model)(tokens[:, :-1]), tokens[:, 1:]

        def each(logits: jax.Array, labels: jax.Array) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(wide(logits), labels)

        found = losses(jax.vmap(jax.vmap(model.head)), x, labels, each)
        return jnp.mean(found, where=labels != PADDING), None

    return chunked(
        Size(
            init=lambda key: eqx.filter(build(key), eqx.is_array),
            sample=partial(sequences, config),
            plain=partial(loss, WIDE),
            hands={HAND: partial(loss, LOW)},
        )
    )


# An encoder and a decoder of linen modules.


class Layer(nn.Module):
    """Attention, to an encoder's results too, and a perceptron, each before a norm."""

    config: Config
    dtype: Any
    attend: Any

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        for given in (x,) if memory is None else (x, memory):
            is_causal = memory is not None and given is not memory

            def attend(q: Any, k: Any, v: Any, causal: bool = is_causal, **_: Any) -> jax.Array:
                return self.attend(q, k, v, causal=causal)

            attention = nn.MultiHeadDotProductAttention(
                self.config.heads, dtype=self.dtype, attention_fn=attend
            )
            x = nn.LayerNorm(dtype=self.dtype)(x + attention(x, given))
        y = nn.gelu(nn.Dense(4 * self.config.width, dtype=self.dtype)(x))
        return nn.LayerNorm(dtype=self.dtype)(x + nn.Dense(self.config.width, dtype=self.dtype)(y))


class Translator(nn.Module):
    """Both towers, over one embedding."""

    config: Config
    dtype: Any = None
    attend: Any = composed

    def setup(self) -> None:
        config, dtype = self.config, self.dtype
        scaled = nn.initializers.normal(config.width**-0.5)
        self.words = nn.Embed(config.vocabulary, config.width, dtype=dtype, embedding_init=scaled)
        self.places = nn.Embed(config.length, config.width, dtype=dtype, embedding_init=scaled)
        given = config, dtype, self.attend
        self.encoder = [Layer(*given) for _ in range(config.layers)]
        self.decoder = [Layer(*given) for _ in range(config.layers)]

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        places = self.places(jnp.arange(source.shape[1]))
        memory, x = (self.words(tokens) + places for tokens in (source, target))
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return x


def smoothed(logits: jax.Array, labels: jax.Array) -> jax.Array:
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), 0.1)
    return optax.softmax_cross_entropy(wide(logits), targets)


def _bart(config: Config) -> Size:
    def loss(dtype: Any, attend: Any, params: Any, batch: Any) -> Any:
        source, target = batch
        model, variables = Translator(config, dtype, attend), {"params": params}
        x: Any = model.apply(variables, source, target[:, :-1])
        table = params["words"]["embedding"].astype(dtype or WIDE)
        found = losses(lambda x: x @ table.T, x, target[:, 1:], smoothed)
        return found.mean(), None

    def init(key: jax.Array) -> Any:
        tokens = jnp.zeros((1, config.length), jnp.int32)
        return Translator(config).init(key, tokens, tokens)["params"]

    def sample(key: jax.Array) -> Any:
        source, target = (sequences(config, k) for k in jax.random.split(key))
        return source[:, 1:], target

    size = Size(
        init=init,
        sample=sample,
        plain=partial(loss, None, composed),
        hands={HAND: partial(loss, LOW, composed), FUSED: partial(loss, LOW, fused.attention)},
    )
    return chunked(size)


_SMALL = Config(layers=2, width=64, heads=4, length=32, batch=4, vocabulary=256)
QWEN = Model(
    "qwen",
    "a Qwen-like decoder of flax nnx, capped, with a z-loss",
    _qwen(Config(layers=4, width=1024, heads=8, length=2048, batch=2, vocabulary=151936)),
    _qwen(_SMALL),
)
MAMBA = Model(
    "mamba",
    "a Mamba-like model of equinox",
    _mamba(Config(layers=4, width=768, heads=1, length=1024, batch=8, vocabulary=50280)),
    _mamba(_SMALL),
)
BART = Model(
    "bart",
    "an encoder and decoder of flax linen, tied, with smoothed labels",
    _bart(Config(layers=3, width=768, heads=12, length=512, batch=16, vocabulary=50265)),
    _bart(_SMALL),
)
