"""ResNet-50 with BatchNorm in training mode, of flax modules; by hand is their own ``dtype``."""

from __future__ import annotations

from collections.abc import Callable
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
)


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut."""

    features: int
    strides: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype)
        strides = (self.strides, self.strides)
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.features, (3, 3), strides=strides)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.features, (1, 1), strides=strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A residual network of bottlenecks."""

    stages: tuple[int, ...]
    width: int
    classes: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (7, 7), strides=(2, 2), use_bias=False, dtype=self.dtype)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(x)
        x = nn.max_pool(nn.relu(x), (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate(self.stages):
            for index in range(blocks):
                strides = 2 if stage > 0 and index == 0 else 1
                x = Bottleneck(self.width * 2**stage, strides, self.dtype)(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(self.classes, dtype=self.dtype)(x)


def loss(model: nn.Module, params: dict[str, Any], batch: tuple[jax.Array, ...]) -> Any:
    """The loss, and the updated running statistics of every BatchNorm."""
    images, labels = batch
    logits, updated = model.apply({"params": params}, images, mutable=["batch_stats"])
    return cross_entropy(logits, labels), updated["batch_stats"]


def classifier(network: Callable[..., nn.Module], classes: int, batch: int, side: int) -> Size:
    """A size of a network of images, which takes the ``dtype`` of its modules."""

    def init(key: jax.Array) -> Any:
        return network().init(key, jnp.zeros((1, side, side, 3)))["params"]

    return Size(
        init=init,
        sample=lambda key: labelled_images(key, batch, side, classes),
        plain=partial(loss, network()),
        hands={HAND: partial(loss, network(dtype=jnp.bfloat16))},
    )


def size(width: int, classes: int, batch: int, side: int) -> Size:
    """A ResNet-50 of some width."""
    return classifier(partial(ResNet, (3, 4, 6, 3), width, classes), classes, batch, side)


RESNET50 = Model(
    "resnet50",
    "ResNet-50 with BatchNorm, training mode",
    full=size(width=64, classes=1000, batch=32, side=224),
    small=size(width=8, classes=10, batch=32, side=32),
)
