"""Language models whose logits are the largest of their arrays, with the heads that such have.

A Llama-like decoder; a Gemma-like one of 262,144 words whose embedding is its head, under a soft
cap; an encoder and decoder like T5 with learnt biases of distances and a z-loss; an encoder like
BERT whose labels have weights. See: Touvron et al. 2023, arXiv:2302.13971; Gemma Team 2024,
arXiv:2408.00118; Raffel et al. 2020, arXiv:1910.10683; Devlin et al. 2018, arXiv:1810.04805.
"""

from __future__ import annotations

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
    negative_log_likelihood,
    weights,
)
from benchmarks.deviceless.models.unseen.parts import (
    Attend,
    attending,
    dense,
    flat,
    heads,
    layer_norm,
    linear,
    norm_params,
    rms_norm,
    wide,
)
from benchmarks.deviceless.models.unseen.words import rotated

BUCKETS, CAP, MASKED = 32, 30.0, 0.15


def sequences(config: Config, key: jax.Array) -> jax.Array:
    return chain_of_tokens(key, config.batch, config.length + 1, config.vocabulary)


# Decoders, their layers scanned over under a checkpoint.


def decoder_init(config: Config, groups: int, inner: int, tied: bool, key: jax.Array) -> Any:
    width, layers = config.width, config.layers
    draw = weights(key, 9)
    narrow = width * groups // config.heads
    shapes = {
        "q": (width, width), "k": (width, narrow), "v": (width, narrow), "out": (width, width),
        "gate": (width, inner), "grow": (width, inner), "shrink": (inner, width),
    }  # fmt: skip
    params = {
        "tokens": draw(config.vocabulary, width, added=width),
        "layers": {name: {"w": draw(layers, *shape)} for name, shape in shapes.items()}
        | {"norm1": jnp.ones((layers, width)), "norm2": jnp.ones((layers, width))},
        "norm": jnp.ones(width),
    }
    return params if tied else params | {"head": draw(width, config.vocabulary)}


def decoder(config: Config, activation: Any, attend: Attend, layers: Any, x: jax.Array) -> Any:
    places, head = jnp.arange(x.shape[1]), config.width // config.heads

    @jax.checkpoint
    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        y = rms_norm(p["norm1"], x)
        q, k, v = (heads(dense(p[name], y), head) for name in "qkv")
        attended = attend(rotated(q, places), rotated(k, places), v, causal=True)
        x = x + dense(p["out"], flat(attended))
        y = rms_norm(p["norm2"], x)
        return x + dense(p["shrink"], activation(dense(p["gate"], y)) * dense(p["grow"], y)), None

    return jax.lax.scan(layer, x, layers)[0]


def llama_loss(config: Config, dtype: Any, attend: Attend, params: Any, tokens: jax.Array) -> Any:
    x = params["tokens"].astype(dtype)[tokens[:, :-1]]
    x = rms_norm(params["norm"], decoder(config, jax.nn.silu, attend, params["layers"], x))
    head = params["head"].astype(dtype)
    return losses(lambda x: x @ head, x, tokens[:, 1:]).mean(), None


def gemma_loss(config: Config, dtype: Any, attend: Attend, params: Any, tokens: jax.Array) -> Any:
    words = params["tokens"].astype(dtype)
    x = words[tokens[:, :-1]] * jnp.asarray(config.width**0.5, dtype)
    x = rms_norm(params["norm"], decoder(config, jax.nn.gelu, attend, params["layers"], x))

    def head(x: jax.Array) -> jax.Array:
        return CAP * jnp.tanh(wide(x @ words.T) / CAP)

    return losses(head, x, tokens[:, 1:]).mean(), None


def _decoder(loss: Any, config: Config, groups: int, inner: int, tied: bool = False) -> Size:
    init = partial(decoder_init, config, groups, inner, tied)
    return chunked(attending(init, partial(sequences, config), partial(loss, config)))


# An encoder and a decoder whose attention has a learnt bias of distances.


def layer_init(draw: Any, width: int, *, crossed: bool) -> Any:
    def square() -> Any:
        return linear(draw, width, width, bias=False)

    def attention() -> Any:
        return {"norm": jnp.ones(width)} | {name: square() for name in "qkvo"}

    grow, shrink = (linear(draw, *(width, 4 * width)[::way], bias=False) for way in (1, -1))
    parts = {"self": attention(), "norm": jnp.ones(width), "grow": grow, "shrink": shrink}
    return parts | ({"cross": attention()} if crossed else {})


def t5_init(config: Config, key: jax.Array) -> Any:
    draw = weights(key, 16 * config.layers + 4)

    def tower(*, crossed: bool) -> Any:
        layers = [layer_init(draw, config.width, crossed=crossed) for _ in range(config.layers)]
        bias = draw(BUCKETS, config.heads, added=2500)
        return {"layers": layers, "bias": bias, "norm": jnp.ones(config.width)}

    words = draw(config.vocabulary, config.width, added=1)
    towers = {"encoder": tower(crossed=False), "decoder": tower(crossed=True)}
    return towers | {"tokens": words, "head": draw(config.width, config.vocabulary)}


def bias_of(table: jax.Array, length: int, dtype: Any, *, causal: bool) -> jax.Array:
    """Learnt numbers [1, N, T, T] of distances, which are told apart the less the larger."""
    far = jnp.arange(length)[None] - jnp.arange(length)[:, None]
    half = BUCKETS if causal else BUCKETS // 2
    near = jnp.abs(far)
    logarithm = half // 2 * (1 + jnp.log(jnp.maximum(near, 1) * 2 / half) / jnp.log(256 / half))
    bucket = jnp.where(near < half // 2, near, jnp.minimum(logarithm.astype(int), half - 1))
    bucket = bucket if causal else bucket + half * (far > 0)
    return jnp.moveaxis(table.astype(dtype)[bucket], -1, 0)[None]


def t5_attention(config: Config, p: Any, x: jax.Array, memory: Any, attend: Any) -> jax.Array:
    y = rms_norm(p["norm"], x)
    given = y if memory is None else memory
    q, k, v = (
        heads(dense(p[name], of), config.width // config.heads)
        for name, of in zip("qkv", (y, given, given), strict=True)
    )
    return x + dense(p["o"], flat(attend(q, k, v)))


def tower(
    config: Config, attend: Attend, p: Any, x: jax.Array, memory: jax.Array | None
) -> jax.Array:
    causal = memory is not None
    bias = bias_of(p["bias"], x.shape[1], x.dtype, causal=causal)
    for layer in p["layers"]:
        own = partial(attend, causal=causal, bias=bias)
        x = t5_attention(config, layer["self"], x, None, own)
        if causal:
            x = t5_attention(config, layer["cross"], x, memory, partial(attend, causal=False))
        y = jax.nn.relu(dense(layer["grow"], rms_norm(layer["norm"], x)))
        x = x + dense(layer["shrink"], y)
    return rms_norm(p["norm"], x)


def with_z_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    total = jax.nn.logsumexp(wide(logits), -1)
    return negative_log_likelihood(logits, labels) + 1e-4 * total**2


def t5_loss(config: Config, dtype: Any, attend: Attend, params: Any, batch: Any) -> Any:
    source, target = batch
    words, head = params["tokens"].astype(dtype), params["head"].astype(dtype)
    memory = tower(config, attend, params["encoder"], words[source], None)
    x = tower(config, attend, params["decoder"], words[target[:, :-1]], memory)
    found = losses(lambda x: x @ head, x, target[:, 1:], with_z_loss)
    counted = target[:, 1:] != 0
    return jnp.sum(found * counted) / jnp.sum(counted), None


def _t5(config: Config) -> Size:
    def sample(key: jax.Array) -> Any:
        source, target = (sequences(config, k) for k in jax.random.split(key))
        return source[:, 1:], target

    return chunked(attending(partial(t5_init, config), sample, partial(t5_loss, config)))


# An encoder that restores masked words.


def bert_init(config: Config, key: jax.Array) -> Any:
    width = config.width
    draw = weights(key, 4 * config.layers + 3)
    layers = [
        {
            "qkv": linear(draw, width, 3 * width),
            "out": linear(draw, width, width),
            "norm1": norm_params(width),
            "grow": linear(draw, width, 4 * width),
            "shrink": linear(draw, 4 * width, width),
            "norm2": norm_params(width),
        }
        for _ in range(config.layers)
    ]
    return {
        "tokens": draw(config.vocabulary, width, added=width),
        "places": draw(config.length, width, added=width),
        "norm": norm_params(width),
        "layers": layers,
        "transform": linear(draw, width, width),
        "last": norm_params(width),
        "bias": jnp.zeros(config.vocabulary),
    }


def bert_loss(config: Config, dtype: Any, attend: Attend, params: Any, batch: Any) -> Any:
    inputs, labels, weight = batch
    words, bias = params["tokens"].astype(dtype), params["bias"].astype(dtype)
    x = layer_norm(params["norm"], words[inputs] + params["places"].astype(dtype))
    for p in params["layers"]:
        q, k, v = (heads(y, config.width // config.heads)
                   for y in jnp.split(dense(p["qkv"], x), 3, -1))  # fmt: skip
        attended = flat(attend(q, k, v, causal=False))
        x = layer_norm(p["norm1"], x + dense(p["out"], attended))
        x = layer_norm(p["norm2"], x + dense(p["shrink"], jax.nn.gelu(dense(p["grow"], x))))
    x = layer_norm(params["last"], jax.nn.gelu(dense(params["transform"], x)))
    found = losses(lambda x: x @ words.T + bias, x, labels)
    return jnp.sum(found * weight) / (jnp.sum(weight) + 1e-5), None


def _bert(config: Config) -> Size:
    def sample(key: jax.Array) -> Any:
        words = sequences(config, key)[:, 1:]
        weight = jax.random.bernoulli(key, MASKED, words.shape).astype(jnp.float32)
        return jnp.where(weight > 0, 0, words), words, weight

    return chunked(attending(partial(bert_init, config), sample, partial(bert_loss, config)))


_SMALL = Config(layers=2, width=64, heads=4, length=32, batch=4, vocabulary=256)
LLAMA = Model(
    "llama",
    "a Llama-like decoder of 65,536 words",
    _decoder(llama_loss, Config(6, 1536, 12, 2048, 2, 65536), 12, 4096),
    _decoder(llama_loss, _SMALL, 4, 128),
)
GEMMA = Model(
    "gemma",
    "a Gemma-like decoder of 262,144 words, tied and capped",
    _decoder(gemma_loss, Config(4, 1024, 8, 2048, 2, 262144), 2, 4096, tied=True),
    _decoder(gemma_loss, _SMALL, 2, 128, tied=True),
)
T5 = Model(
    "t5",
    "an encoder and decoder with learnt biases",
    _t5(Config(layers=4, width=768, heads=12, length=512, batch=16, vocabulary=32128)),
    _t5(_SMALL),
)
BERT = Model(
    "bert",
    "an encoder of masked words with weights",
    _bert(Config(layers=6, width=768, heads=12, length=512, batch=16, vocabulary=30522)),
    _bert(_SMALL),
)
