"""A diffusion transformer: adaptive norms and gates from a time and a class.

See: Peebles and Xie 2023, arXiv:2212.09748.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.deviceless.models import fused
from benchmarks.deviceless.models.model import Model, Size, weights
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
    wide,
)

CHANNELS, CLASSES, FREQUENCIES, HEAD = 16, 1000, 256, 64


def init(layers: int, width: int, length: int, key: jax.Array) -> Any:
    draw = weights(key, 6 * layers + 8)
    return {
        "patch": linear(draw, CHANNELS, width),
        "positions": draw(length, width, added=2500),
        "time": [linear(draw, FREQUENCIES, width), linear(draw, width, width)],
        "classes": draw(CLASSES, width, added=2500),
        "layers": [
            {
                "modulate": linear(draw, width, 6 * width),
                "qkv": linear(draw, width, 3 * width),
                "out": linear(draw, width, width),
                "grow": linear(draw, width, 4 * width),
                "shrink": linear(draw, 4 * width, width),
            }
            for _ in range(layers)
        ],
        "modulate": linear(draw, width, 2 * width),
        "head": linear(draw, width, CHANNELS),
    }


Modulate = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def modulated(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    return layer_norm({}, x) * (1 + scale) + shift


def modulated_in_float32(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    return modulated(wide(x), wide(shift), wide(scale)).astype(x.dtype)


def block(attend: Attend, modulated: Modulate, p: Any, x: jax.Array, given: jax.Array) -> jax.Array:
    parts = jnp.split(dense(p["modulate"], jax.nn.silu(given))[:, None], 6, -1)
    shift1, scale1, gate1, shift2, scale2, gate2 = parts
    qkv = dense(p["qkv"], modulated(x, shift1, scale1))
    q, k, v = (heads(part, HEAD) for part in jnp.split(qkv, 3, -1))
    x = x + gate1 * dense(p["out"], flat(attend(q, k, v, causal=False)))
    hidden = jax.nn.gelu(dense(p["grow"], modulated(x, shift2, scale2)))
    return x + gate2 * dense(p["shrink"], hidden)


def loss(
    dtype: Any, attend: Attend, params: Any, batch: Any, modulated: Modulate = modulated
) -> Any:
    image, noise, time, label = batch
    share = time[:, None, None]
    x = dense(params["patch"], ((1 - share) * image + share * noise).astype(dtype))
    x = x + params["positions"].astype(dtype)
    angles = 1000 * time[:, None] * jnp.exp(-jnp.arange(FREQUENCIES // 2) / 14)
    given = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(dtype)
    first, second = params["time"]
    given = dense(second, jax.nn.silu(dense(first, given)))
    given = given + params["classes"][label].astype(dtype)
    for p in params["layers"]:
        x = block(attend, modulated, p, x, given)
    shift, scale = jnp.split(dense(params["modulate"], jax.nn.silu(given))[:, None], 2, -1)
    found = dense(params["head"], modulated(x, shift, scale))
    return jnp.mean((wide(found) - (noise - image)) ** 2), None


def sample(batch: int, length: int, key: jax.Array) -> Any:
    keys = jax.random.split(key, 4)
    image, noise = (jax.random.normal(k, (batch, length, CHANNELS)) for k in keys[:2])
    time = jax.random.uniform(keys[2], (batch,))
    return image, noise, time, jax.random.randint(keys[3], (batch,), 0, CLASSES)


def _size(layers: int, width: int, batch: int, length: int) -> Size:
    size = attending(partial(init, layers, width, length), partial(sample, batch, length), loss)
    summing = partial(loss, LOW, fused.attention, modulated=modulated_in_float32)
    return replace(size, hands=size.hands | {SUMS: summing})


DIT = Model("dit", "a diffusion transformer", _size(4, 1024, 8, 1024), _size(2, 128, 4, 32))
