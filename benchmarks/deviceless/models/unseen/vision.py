"""Images and points: depthwise filters, attention in shifted windows, a radiance field.

See: Liu et al. 2022, arXiv:2201.03545; Liu et al. 2021, arXiv:2103.14030; Mildenhall et al. 2020,
arXiv:2003.08934.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.deviceless.models.model import (
    HAND,
    Model,
    Size,
    cross_entropy,
    labelled_images,
    weights,
)
from benchmarks.deviceless.models.unseen.parts import LOW, dense, linear, size, wide


class ConvNeXt(nn.Module):
    """Depthwise filters of seven by seven, a norm, a perceptron under a learnt scale."""

    depths: tuple[int, ...]
    width: int
    classes: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(nn.Conv, dtype=self.dtype)
        norm = partial(nn.LayerNorm, dtype=self.dtype)
        for stage, depth in enumerate(self.depths):
            width, step = self.width * 2**stage, 2 if stage else 4
            x = norm()(x) if stage else x
            x = conv(width, (step, step), strides=step)(x)
            x = x if stage else norm()(x)
            for block in range(depth):
                y = norm()(conv(width, (7, 7), feature_group_count=width)(x))
                y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y))
                y = nn.Dense(width, dtype=self.dtype)(y)
                scale = self.param(f"scale{stage}.{block}", nn.initializers.ones, (width,))
                x = x + y * jnp.asarray(scale, y.dtype)
        return nn.Dense(self.classes, dtype=self.dtype)(norm()(x.mean((1, 2))))


class Windows(nn.Module):
    """Attention within windows, under a learnt bias of two places."""

    heads: int
    window: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        rows, width, count = x.shape[1], x.shape[-1], self.window**2
        qkv = nn.Dense(3 * width, dtype=self.dtype)(x).reshape(*x.shape[:-1], 3, self.heads, -1)
        q, k, v = (qkv[..., i, :, :] for i in range(3))
        place = jnp.stack(jnp.meshgrid(*[jnp.arange(self.window)] * 2, indexing="ij"), -1)
        place = place.reshape(count, 2)
        apart = (place[:, None] - place + self.window - 1) @ jnp.array([2 * self.window - 1, 1])
        table = self.param(
            "bias", nn.initializers.normal(0.02), ((2 * self.window - 1) ** 2, self.heads)
        )
        bias = jnp.moveaxis(table[apart], -1, 0)
        scores = jnp.einsum("bwqnh,bwknh->bwnqk", q * q.shape[-1] ** -0.5, k)
        scores = wide(scores) + bias
        if mask is not None:
            scores = scores + mask[:, None]
        shares = jax.nn.softmax(scores).astype(x.dtype)
        y = jnp.einsum("bwnqk,bwknh->bwqnh", shares, v).reshape(-1, rows, count, width)
        return nn.Dense(width, dtype=self.dtype)(y)


class Swin(nn.Module):
    """Stages of windows, every second layer's shifted by half a window."""

    depths: tuple[int, ...]
    width: int
    classes: int
    window: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = partial(nn.LayerNorm, dtype=self.dtype)
        x = norm()(nn.Conv(self.width, (4, 4), strides=4, dtype=self.dtype)(x))
        for stage, depth in enumerate(self.depths):
            if stage:
                batch, side, _, width = x.shape
                x = x.reshape(batch, side // 2, 2, side // 2, 2, width).swapaxes(2, 3)
                x = norm()(x.reshape(batch, side // 2, side // 2, 4 * width))
                x = nn.Dense(2 * width, use_bias=False, dtype=self.dtype)(x)
            for layer in range(depth):
                x = x + self.attended(norm()(x), shift=layer % 2 == 1)
                y = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(norm()(x)))
                x = x + nn.Dense(x.shape[-1], dtype=self.dtype)(y)
        return nn.Dense(self.classes, dtype=self.dtype)(norm()(x).mean((1, 2)))

    def attended(self, x: jax.Array, shift: bool) -> jax.Array:
        half, mask = self.window // 2, None
        if shift:
            x = jnp.roll(x, (-half, -half), (1, 2))
            edge = jnp.arange(x.shape[1])
            part = (edge >= x.shape[1] - self.window).astype(int) + (edge >= x.shape[1] - half)
            part = self.cut((3 * part[:, None] + part)[None, ..., None])[0, ..., 0]
            mask = jnp.where(part[:, :, None] == part[:, None], 0.0, -100.0)
        heads = x.shape[-1] // 32
        y = Windows(heads, self.window, self.dtype)(self.cut(x), mask)
        batch, side, n = x.shape[0], x.shape[1], self.window
        y = y.reshape(batch, side // n, side // n, n, n, -1).swapaxes(2, 3).reshape(x.shape)
        return jnp.roll(y, (half, half), (1, 2)) if shift else y

    def cut(self, x: jax.Array) -> jax.Array:
        batch, side, n = x.shape[0], x.shape[1], self.window
        x = x.reshape(batch, side // n, n, side // n, n, -1).swapaxes(2, 3)
        return x.reshape(batch, -1, n * n, x.shape[-1])


def image_loss(model: nn.Module, params: Any, batch: Any) -> Any:
    logits: Any = model.apply({"params": params}, batch[0])
    return cross_entropy(logits, batch[1]), None


def _classifier(network: Any, classes: int, batch: int, side: int) -> Size:
    return Size(
        init=lambda key: network().init(key, jnp.zeros((1, side, side, 3)))["params"],
        sample=lambda key: labelled_images(key, batch, side, classes),
        plain=partial(image_loss, network()),
        hands={HAND: partial(image_loss, network(dtype=LOW))},
    )


CONVNEXT = Model(
    "convnext",
    "ConvNeXt of flax modules",
    _classifier(partial(ConvNeXt, (1, 1, 2, 1), 96, 1000), 1000, 32, 224),
    _classifier(partial(ConvNeXt, (1, 1), 32, 10), 10, 8, 32),
)
SWIN = Model(
    "swin",
    "Swin windows of flax modules",
    _classifier(partial(Swin, (2, 2), 96, 1000, 8), 1000, 32, 256),
    _classifier(partial(Swin, (2,), 32, 10, 4), 10, 8, 32),
)


# A radiance field: points along rays through a perceptron, composed to a colour.


def field_init(width: int, layers: int, key: jax.Array) -> Any:
    draw = weights(key, layers + 4)
    return {
        "layers": [linear(draw, width if i else 63, width) for i in range(layers)],
        "again": linear(draw, 63, width, bias=False),
        "density": linear(draw, width, 1),
        "colour": [linear(draw, width, width // 2), linear(draw, width // 2, 3)],
    }


def encoded(x: jax.Array) -> jax.Array:
    angles = (x[..., None, :] * 2.0 ** jnp.arange(10)[:, None]).reshape(*x.shape[:-1], -1)
    return jnp.concatenate([x, jnp.sin(angles), jnp.cos(angles)], -1)


def field_loss(dtype: Any, params: Any, batch: Any) -> Any:
    origin, direction, target = batch
    depth = jnp.linspace(0.1, 4, 128)
    points = origin[:, None] + direction[:, None] * depth[:, None]
    seen = encoded(points).astype(dtype)
    x = seen
    for i, p in enumerate(params["layers"]):
        y = dense(p, x)
        x = jax.nn.relu(y + dense(params["again"], seen) if i == len(params["layers"]) // 2 else y)
    density = jax.nn.softplus(wide(dense(params["density"], x)))[..., 0]
    first, second = params["colour"]
    colour = jax.nn.sigmoid(wide(dense(second, jax.nn.relu(dense(first, x)))))
    absorbed = density * (depth[1] - depth[0])
    passed = jnp.exp(-(jnp.cumsum(absorbed, -1) - absorbed))
    found = jnp.einsum("rs,rsc->rc", passed * (1 - jnp.exp(-absorbed)), colour)
    return jnp.mean((found - target) ** 2), None


def _field(width: int, layers: int, rays: int) -> Size:
    def sample(key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        origin, direction = (jax.random.normal(k, (rays, 3)) for k in keys[:2])
        return origin, direction, jax.random.uniform(keys[2], (rays, 3))

    return size(partial(field_init, width, layers), sample, field_loss)


FIELD = Model("field", "a radiance field", _field(256, 8, 2048), _field(32, 4, 16))
