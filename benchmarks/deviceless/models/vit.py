"""A vision transformer of flax modules; by hand is their own ``dtype``."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.deviceless.models import fused
from benchmarks.deviceless.models.fused import FUSED
from benchmarks.deviceless.models.model import (
    HAND,
    Model,
    Size,
    cross_entropy,
    labelled_images,
)


def fused_attention(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
    return fused.attention(query, key, value, causal=False)


class Encoder(nn.Module):
    """One layer: attention and a perceptron, each after a norm."""

    heads: int
    dtype: Any
    fused: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x)
        how = fused_attention if self.fused else nn.dot_product_attention
        attend = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype, attention_fn=how)
        x = x + attend(y)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y))
        return x + nn.Dense(width, dtype=self.dtype)(y)


class ViT(nn.Module):
    """Patches, positions, encoders, the mean over patches, a head."""

    layers: int
    width: int
    heads: int
    patch: int
    classes: int
    dtype: Any = None
    fused: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size = (self.patch, self.patch)
        x = nn.Conv(self.width, size, strides=size, padding="VALID", dtype=self.dtype)(x)
        x = x.reshape(x.shape[0], -1, self.width)
        positions = self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        x = x + jnp.asarray(positions, x.dtype)
        for _ in range(self.layers):
            x = Encoder(self.heads, self.dtype, self.fused)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(x.mean(axis=1))


def loss(model: ViT, params: dict[str, Any], batch: tuple[jax.Array, ...]) -> Any:
    images, labels = batch
    logits: Any = model.apply({"params": params}, images)
    return cross_entropy(logits, labels), None


def _size(
    layers: int, width: int, heads: int, patch: int, classes: int, batch: int, side: int
) -> Size:
    network = partial(ViT, layers, width, heads, patch, classes)

    def init(key: jax.Array) -> Any:
        return network().init(key, jnp.zeros((1, side, side, 3)))["params"]

    return Size(
        init=init,
        sample=lambda key: labelled_images(key, batch, side, classes),
        plain=partial(loss, network()),
        hands={
            HAND: partial(loss, network(dtype=jnp.bfloat16)),
            FUSED: partial(loss, network(dtype=jnp.bfloat16, fused=True)),
        },
    )


VIT = Model(
    "vit",
    "ViT-B/16, six layers",
    full=_size(layers=6, width=768, heads=12, patch=16, classes=1000, batch=32, side=256),
    small=_size(layers=4, width=64, heads=4, patch=4, classes=10, batch=32, side=32),
)

PATCHES_196 = Model(
    "vit-224",
    "ViT-B/16, six layers, images of 224 × 224: 196 words",
    full=_size(layers=6, width=768, heads=12, patch=16, classes=1000, batch=128, side=224),
    small=_size(layers=4, width=64, heads=4, patch=4, classes=10, batch=32, side=28),
)
