"""DenseNet-121 with BatchNorm in training mode, of flax modules; by hand is their own ``dtype``.

Each layer of a block reads the concatenation of the block's input and of all layers before it.

See: Huang, Liu, van der Maaten and Weinberger 2017, arXiv:1608.06993.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.deviceless.models.model import Model
from benchmarks.deviceless.models.resnet import classifier


class DenseNet(nn.Module):
    """Dense blocks of bottleneck layers, with a transition between two blocks."""

    blocks: tuple[int, ...]
    growth: int
    classes: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype)
        x = nn.relu(norm()(conv(2 * self.growth, (7, 7), strides=(2, 2))(x)))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block, layers in enumerate(self.blocks):
            if block > 0:
                x = conv(x.shape[-1] // 2, (1, 1))(nn.relu(norm()(x)))
                x = nn.avg_pool(x, (2, 2), strides=(2, 2))
            for _ in range(layers):
                y = conv(4 * self.growth, (1, 1))(nn.relu(norm()(x)))
                y = conv(self.growth, (3, 3))(nn.relu(norm()(y)))
                x = jnp.concatenate([x, y], axis=-1)
        x = jnp.mean(nn.relu(norm()(x)), axis=(1, 2))
        return nn.Dense(self.classes, dtype=self.dtype)(x)


DENSENET121 = Model(
    "densenet121",
    "DenseNet-121 with BatchNorm, training mode",
    full=classifier(partial(DenseNet, (6, 12, 24, 16), 32, 1000), 1000, batch=32, side=224),
    small=classifier(partial(DenseNet, (2, 2), 8, 10), 10, batch=32, side=32),
)
