"""Handwritten digits that scikit-learn ships, as batches."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """1,797 handwritten digits of 8 × 8, of mean zero and variance one, and which they are."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    images = found.images.astype(np.float32)
    return (images - images.mean()) / images.std(), found.target.astype(np.int32)


def labelled(key: jax.Array, batch: int, side: int) -> tuple[jax.Array, jax.Array]:
    """Draw digits, as large as asked: float32 [batch, side, side, 3], and int32 [batch]."""
    images, labels = map(jnp.asarray, digits())
    drawn = jax.random.randint(key, (batch,), 0, len(labels))
    large = jax.image.resize(images[drawn], (batch, side, side), "linear")
    return jnp.repeat(large[..., None], 3, axis=-1), labels[drawn]
