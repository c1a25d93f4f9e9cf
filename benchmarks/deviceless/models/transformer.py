"""A decoder-only transformer, its layers written out or scanned over with rematerialisation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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

Saves = Callable[..., Any]
NOTHING: Saves = jax.checkpoint_policies.nothing_saveable
"""Which residuals the checkpoint around a scanned layer saves."""

FULL = Config(layers=4, width=1024, heads=16, length=1024, batch=4, vocabulary=8192)
SMALL = Config(layers=4, width=64, heads=4, length=32, batch=16, vocabulary=128)


def init(config: Config, key: jax.Array) -> dict[str, Any]:
    """Parameters in float32; the layers' have a leading axis over layers."""
    width, layers = config.width, config.layers
    keys = iter(jax.random.split(key, 8))

    def normal(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape)

    return {
        "tokens": normal(config.vocabulary, width),
        "positions": normal(config.length, width),
        "layers": {
            "norm1": {"scale": jnp.ones((layers, width)), "bias": jnp.zeros((layers, width))},
            "qkv": {"w": normal(layers, width, 3 * width), "b": jnp.zeros((layers, 3 * width))},
            "out": {"w": normal(layers, width, width), "b": jnp.zeros((layers, width))},
            "norm2": {"scale": jnp.ones((layers, width)), "bias": jnp.zeros((layers, width))},
            "grow": {"w": normal(layers, width, 4 * width), "b": jnp.zeros((layers, 4 * width))},
            "shrink": {"w": normal(layers, 4 * width, width), "b": jnp.zeros((layers, width))},
        },
        "norm": {"scale": jnp.ones(width), "bias": jnp.zeros(width)},
        "head": normal(width, config.vocabulary),
    }


def unrolled(config: Config, key: jax.Array) -> dict[str, Any]:
    """The same parameters with a list of layers."""
    params = init(config, key)
    stacked = params["layers"]
    layers = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(config.layers)]
    return params | {"layers": layers}


# As a user writes it.


def layer_norm(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]


def dense(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def attention(config: Config, p: dict[str, Any], x: jax.Array) -> jax.Array:
    split = (*x.shape[:2], config.heads, config.width // config.heads)
    q, k, v = (part.reshape(split) for part in jnp.split(dense(p["qkv"], x), 3, axis=-1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(split[-1])
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return dense(p["out"], jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))


def block(config: Config, x: jax.Array, p: dict[str, Any]) -> jax.Array:
    x = x + attention(config, p, layer_norm(p["norm1"], x))
    hidden = jax.nn.gelu(dense(p["grow"], layer_norm(p["norm2"], x)))
    return x + dense(p["shrink"], hidden)


def loss(
    config: Config, scanned: bool, params: dict[str, Any], tokens: jax.Array, saves: Saves = NOTHING
) -> tuple[jax.Array, None]:
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    x = params["tokens"][inputs] + params["positions"]
    if scanned:
        step = jax.checkpoint(partial(block, config), policy=saves)
        x, _ = jax.lax.scan(lambda x, p: (step(x, p), None), x, params["layers"])
    else:
        for layer in params["layers"]:
            x = block(config, x, layer)
    x = layer_norm(params["norm"], x)
    return losses(lambda x: x @ params["head"], x, labels).mean(), None


# As an expert writes it: activations in bfloat16, parameters cast where they are used, statistics
# and loss in float32. The softmax comes in three versions: as flax has it, in bfloat16; in float32,
# which is more accurate and leaves float32 residuals; in float32 but recomputed going backward.

# And once all of attention is one kernel.

Softmax = Callable[[jax.Array], jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def softmax_in_f32(scores: jax.Array) -> jax.Array:
    return jax.nn.softmax(scores.astype(jnp.float32)).astype(LOW)


def hand_layer_norm(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return layer_norm(p, x.astype(jnp.float32)).astype(LOW)


def hand_dense(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ p["w"].astype(LOW) + p["b"].astype(LOW)


def attend(softmax: Softmax, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * jnp.asarray(q.shape[-1] ** -0.5, LOW), k)
    causal = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    weights = softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def hand_attention(config: Config, attend: Attend, p: dict[str, Any], x: jax.Array) -> jax.Array:
    split = (*x.shape[:2], config.heads, config.width // config.heads)
    q, k, v = (part.reshape(split) for part in jnp.split(hand_dense(p["qkv"], x), 3, axis=-1))
    return hand_dense(p["out"], attend(q, k, v).reshape(x.shape))


def hand_block(config: Config, attend: Attend, x: jax.Array, p: dict[str, Any]) -> jax.Array:
    x = x + hand_attention(config, attend, p, hand_layer_norm(p["norm1"], x))
    hidden = jax.nn.gelu(hand_dense(p["grow"], hand_layer_norm(p["norm2"], x)))
    return x + hand_dense(p["shrink"], hidden)


def hand_loss(
    config: Config,
    scanned: bool,
    attend: Attend,
    params: dict[str, Any],
    tokens: jax.Array,
    saves: Saves = NOTHING,
) -> tuple[jax.Array, None]:
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    x = params["tokens"][inputs].astype(LOW) + params["positions"].astype(LOW)
    step = partial(hand_block, config, attend)
    if scanned:
        kept = jax.checkpoint(step, policy=saves)
        x, _ = jax.lax.scan(lambda x, p: (kept(x, p), None), x, params["layers"])
    else:
        for layer in params["layers"]:
            x = step(x, layer)
    x, head = hand_layer_norm(params["norm"], x), params["head"].astype(LOW)
    return losses(lambda x: x @ head, x, labels).mean(), None


ATTENTIONS: dict[str, Attend] = {
    HAND: partial(attend, jax.nn.softmax),
    FUSED: partial(fused.attention, causal=True),
    "hand, f32 softmax": partial(attend, softmax_in_f32),
    "hand, f32 softmax recomputed": partial(attend, jax.checkpoint(softmax_in_f32)),
}


def _size(config: Config, scanned: bool, saves: Saves = NOTHING) -> Size:
    size = Size(
        init=partial(init if scanned else unrolled, config),
        sample=lambda key: chain_of_tokens(key, config.batch, config.length + 1, config.vocabulary),
        plain=partial(loss, config, scanned, saves=saves),
        hands={
            name: partial(hand_loss, config, scanned, attend, saves=saves)
            for name, attend in ATTENTIONS.items()
        },
    )
    return chunked(size)


def _model(name: str, title: str, scanned: bool) -> Model:
    return Model(name, title, _size(FULL, scanned), _size(SMALL, scanned))


UNROLLED = _model("transformer", "decoder-only transformer, layers unrolled", scanned=False)
SCANNED = _model("scanned", "the same, scanned over layers with checkpoint", scanned=True)
