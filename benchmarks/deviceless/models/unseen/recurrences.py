"""Recurrences that are trained by chunks: a state-space model, and retention scanned over chunks.

See: Dao and Gu 2024, arXiv:2405.21060; Sun et al. 2023, arXiv:2307.08621.
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
    weights,
)
from benchmarks.deviceless.models.unseen.parts import (
    dense,
    flat,
    heads,
    layer_norm,
    linear,
    rms_norm,
    size,
    wide,
)

HEAD, STATE, WINDOW = 64, 64, 4


# State-space duality, after the minimal code of its authors.


def ssd_init(config: Config, key: jax.Array) -> Any:
    width, inner = config.width, 2 * config.width
    draw = weights(key, 3 * config.layers + 2)
    layers = [
        {
            "scale": jnp.ones(width),
            "in": linear(draw, width, 2 * inner + 2 * STATE + config.heads, bias=False),
            "conv": draw(WINDOW, inner + 2 * STATE),
            "rate": jnp.zeros(config.heads),
            "log": jnp.zeros(config.heads),
            "skip": jnp.ones(config.heads),
            "norm": jnp.ones(inner),
            "out": linear(draw, inner, width, bias=False),
        }
        for _ in range(config.layers)
    ]
    head = draw(width, config.vocabulary)
    return {"tokens": draw(config.vocabulary, width, added=1), "layers": layers, "head": head}


def segment_sums(x: jax.Array) -> jax.Array:
    """Sums of each range of the last axis, -inf where a range would run backwards."""
    total = jnp.cumsum(x, -1)
    allowed = jnp.tril(jnp.ones((x.shape[-1], x.shape[-1]), bool))
    return jnp.where(allowed, total[..., :, None] - total[..., None, :], -jnp.inf)


def ssd(x: jax.Array, log: jax.Array, b: jax.Array, c: jax.Array, chunk: int) -> jax.Array:
    """Apply the recurrence by chunks: x [B, T, N, H], log [B, T, N], b and c [B, T, S]."""
    x, b, c = (y.reshape(y.shape[0], -1, chunk, *y.shape[2:]) for y in (x, b, c))
    log = jnp.moveaxis(log.reshape(log.shape[0], -1, chunk, log.shape[-1]), 3, 1)  # [B, N, C, L]
    total = jnp.cumsum(log, -1)

    def decay(y: jax.Array) -> jax.Array:
        return jnp.exp(y).astype(x.dtype)

    inside = jnp.einsum("bcls,bcms,bnclm,bcmnh->bclnh", c, b, decay(segment_sums(log)), x)
    states = jnp.einsum("bcls,bncl,bclnh->bcnhs", b, decay(total[..., -1:] - total), x)
    states = jnp.concatenate([jnp.zeros_like(states[:, :1]), states], 1)
    between = segment_sums(jnp.pad(total[..., -1], ((0, 0), (0, 0), (1, 0))))
    states = jnp.einsum("bnzc,bcnhs->bznhs", decay(between), states)[:, :-1]
    across = jnp.einsum("bcls,bcnhs,bncl->bclnh", c, states, decay(total))
    return (inside + across).reshape(x.shape[0], -1, *x.shape[3:])


def convolved(w: jax.Array, x: jax.Array) -> jax.Array:
    """A causal depthwise convolution of a few taps."""
    padded = jnp.pad(x, ((0, 0), (WINDOW - 1, 0), (0, 0)))
    taps = [padded[:, i : i + x.shape[1]] * w[i].astype(x.dtype) for i in range(WINDOW)]
    return sum(taps[1:], taps[0])


def ssd_block(config: Config, chunk: int, p: Any, x: jax.Array) -> jax.Array:
    inner = 2 * config.width
    parts = dense(p["in"], rms_norm(p["scale"], x))
    gate, mixed, rate = jnp.split(parts, [inner, 2 * inner + 2 * STATE], -1)
    mixed = jax.nn.silu(convolved(p["conv"], mixed))
    y, b, c = jnp.split(mixed, [inner, inner + STATE], -1)
    rate = jax.nn.softplus(wide(rate) + p["rate"])
    y = heads(y, HEAD)
    new = ssd(y * rate[..., None].astype(y.dtype), -jnp.exp(p["log"]) * rate, b, c, chunk)
    new = flat(new + y * p["skip"].astype(y.dtype)[:, None])
    return x + dense(p["out"], rms_norm(p["norm"], new * jax.nn.silu(gate)))


def ssd_loss(config: Config, chunk: int, dtype: Any, params: Any, tokens: jax.Array) -> Any:
    x = params["tokens"][tokens[:, :-1]].astype(dtype)
    for p in params["layers"]:
        x = ssd_block(config, chunk, p, x)
    head = params["head"].astype(dtype)
    return losses(lambda x: x @ head, x, tokens[:, 1:]).mean(), None


# Retention: linear attention under one decay for each head, scanned over chunks.


def retnet_init(config: Config, key: jax.Array) -> Any:
    width = config.width
    draw = weights(key, 7 * config.layers + 2)
    square = ("q", "k", "v", "gate", "out")
    layers = [
        {
            "norm1": jnp.ones(width),
            **{name: linear(draw, width, width, bias=False) for name in square},
            "norm2": jnp.ones(width),
            "grow": linear(draw, width, 4 * width, bias=False),
            "shrink": linear(draw, 4 * width, width, bias=False),
        }
        for _ in range(config.layers)
    ]
    head = draw(width, config.vocabulary)
    return {"tokens": draw(config.vocabulary, width, added=1), "layers": layers, "head": head}


def rotated(x: jax.Array) -> jax.Array:
    """Rotate pairs of [B, T, N, H] by their place."""
    rates = 10000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2)
    angles = (jnp.arange(x.shape[1])[:, None] * rates)[:, None]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    one, other = jnp.split(x, 2, -1)
    return jnp.concatenate([one * cos - other * sin, one * sin + other * cos], -1)


def retention(q: jax.Array, k: jax.Array, v: jax.Array, chunk: int) -> jax.Array:
    """Retain over [B, T, N, H], chunk after chunk."""
    shape = q.shape
    gamma = jnp.log(1 - 2.0 ** -jnp.linspace(5, 12, shape[2]))
    place = jnp.arange(chunk)
    apart = (place[:, None] - place)[None]
    mask = jnp.where(apart >= 0, jnp.exp(gamma[:, None, None] * apart), 0).astype(q.dtype)
    left = jnp.exp(gamma * (chunk - 1 - place)[:, None])[..., None].astype(q.dtype)
    come = jnp.exp(gamma * (place + 1)[:, None])[..., None].astype(q.dtype)
    decay = jnp.exp(gamma * chunk)[:, None, None]

    def step(state: jax.Array, qkv: Any) -> Any:
        q, k, v = qkv
        scores = jnp.einsum("blnh,bmnh->bnlm", q, k) * mask
        inside = jnp.einsum("bnlm,bmnh->blnh", scores, v)
        across = jnp.einsum("blnh,bnhg->blng", q * come, state.astype(q.dtype))
        new = jnp.einsum("blnh,blng->bnhg", k * left, v)
        return state * decay + wide(new), inside + across

    by_chunk = [jnp.moveaxis(x.reshape(shape[0], -1, chunk, *shape[2:]), 1, 0) for x in (q, k, v)]
    empty = jnp.zeros((shape[0], *shape[2:], shape[-1]))
    _, found = jax.lax.scan(step, empty, tuple(by_chunk))
    return jnp.moveaxis(found, 0, 1).reshape(shape)


def retnet_block(config: Config, chunk: int, p: Any, x: jax.Array) -> jax.Array:
    y = rms_norm(p["norm1"], x)
    q, k, v = (heads(dense(p[name], y), config.width // config.heads) for name in "qkv")
    k = rotated(k) * jnp.asarray(k.shape[-1] ** -0.5, k.dtype)
    retained = flat(layer_norm({}, retention(rotated(q), k, v, chunk)))
    x = x + dense(p["out"], jax.nn.silu(dense(p["gate"], y)) * retained)
    return x + dense(p["shrink"], jax.nn.gelu(dense(p["grow"], rms_norm(p["norm2"], x))))


def retnet_loss(config: Config, chunk: int, dtype: Any, params: Any, tokens: jax.Array) -> Any:
    x = params["tokens"][tokens[:, :-1]].astype(dtype)
    for p in params["layers"]:
        x = retnet_block(config, chunk, p, x)
    head = params["head"].astype(dtype)
    return losses(lambda x: x @ head, x, tokens[:, 1:]).mean(), None


def _size(init: Any, loss: Any, config: Config, chunk: int) -> Size:
    def sample(key: jax.Array) -> jax.Array:
        return chain_of_tokens(key, config.batch, config.length + 1, config.vocabulary)

    return chunked(size(partial(init, config), sample, partial(loss, config, chunk)))


_SMALL = Config(layers=2, width=64, heads=2, length=32, batch=8, vocabulary=128)
SSD = Model(
    "ssd",
    "a state-space model by chunks",
    _size(ssd_init, ssd_loss, Config(3, 768, 24, 2048, 4, 8192), 128),
    _size(ssd_init, ssd_loss, Config(2, 32, 1, 32, 8, 128), 8),
)
RETNET = Model(
    "retnet",
    "retention scanned over chunks",
    _size(retnet_init, retnet_loss, Config(3, 1024, 8, 2048, 4, 8192), 256),
    _size(retnet_init, retnet_loss, _SMALL, 8),
)
