"""A diffusion model's U-Net of flax modules, with group norms; by hand is their own ``dtype``.

It predicts the noise in an image from the image and a time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.deviceless.models.model import HAND, Model, Size, labelled_images

GROUPS = 8


class Residual(nn.Module):
    """Two convolutions, each after a norm; what is known of the time is added between them."""

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        norm = partial(nn.GroupNorm, GROUPS, dtype=self.dtype)
        convolve = partial(nn.Conv, self.width, dtype=self.dtype)
        y = convolve((3, 3))(nn.silu(norm()(x)))
        y = y + nn.Dense(self.width, dtype=self.dtype)(nn.silu(time))[:, None, None]
        y = convolve((3, 3))(nn.silu(norm()(y)))
        return y + (x if x.shape[-1] == self.width else convolve((1, 1))(x))


class Attention(nn.Module):
    """Each pixel reads all others."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.GroupNorm(GROUPS, dtype=self.dtype)(x).reshape(x.shape[0], -1, x.shape[-1])
        return x + nn.MultiHeadDotProductAttention(4, dtype=self.dtype)(y).reshape(x.shape)


class UNet(nn.Module):
    """Down twice and up again, beside what was there on the way down."""

    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        narrow, wide = self.width, 2 * self.width
        dense = partial(nn.Dense, wide, dtype=self.dtype)
        time = dense()(nn.silu(dense()(time)))
        convolve = partial(nn.Conv, kernel_size=(3, 3), dtype=self.dtype)
        fine = Residual(narrow, self.dtype)(convolve(narrow)(x), time)
        coarse = Residual(narrow, self.dtype)(convolve(narrow, strides=2)(fine), time)
        coarse = Attention(self.dtype)(coarse)
        x = Residual(wide, self.dtype)(convolve(wide, strides=2)(coarse), time)
        x = Residual(wide, self.dtype)(Attention(self.dtype)(x), time)
        for beside in (coarse, fine):
            size = (*beside.shape[:3], x.shape[-1])
            x = convolve(narrow)(jax.image.resize(x, size, "nearest"))
            x = Residual(narrow, self.dtype)(jnp.concatenate([x, beside], -1), time)
        return convolve(3)(nn.silu(nn.GroupNorm(GROUPS, dtype=self.dtype)(x)))


def loss(model: UNet, params: dict[str, Any], batch: tuple[jax.Array, ...]) -> Any:
    image, noise, time = batch
    share = time[:, None, None, None]
    angles = time[:, None] * 2.0 ** jnp.arange(8)
    seen = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    noisy = jnp.sqrt(1 - share) * image + jnp.sqrt(share) * noise
    found: Any = model.apply({"params": params}, noisy, seen)
    return ((found.astype(jnp.float32) - noise) ** 2).mean(), None


def _size(width: int, batch: int, side: int) -> Size:
    def init(key: jax.Array) -> Any:
        return UNet(width).init(key, jnp.zeros((1, side, side, 3)), jnp.zeros((1, 16)))["params"]

    def sample(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        images, _ = labelled_images(keys[0], batch, side, 10)
        return (
            images,
            jax.random.normal(keys[1], images.shape),
            jax.random.uniform(keys[2], (batch,)),
        )

    return Size(
        init=init,
        sample=sample,
        plain=partial(loss, UNet(width)),
        hands={HAND: partial(loss, UNet(width, jnp.bfloat16))},
    )


UNET = Model(
    "unet",
    "a diffusion model's U-Net, two levels down",
    full=_size(width=128, batch=16, side=64),
    small=_size(width=32, batch=16, side=16),
)
