"""Images that scikit-learn ships: handwritten digits and two photographs, as batches."""

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


@functools.cache
def photographs() -> np.ndarray:
    """Two photographs, float32 [2, 427, 640, 3] between -1 and 1."""
    from sklearn.datasets import load_sample_images

    found: Any = load_sample_images()
    return np.stack(found.images).astype(np.float32) / 127.5 - 1


def labelled(key: jax.Array, batch: int, side: int) -> tuple[jax.Array, jax.Array]:
    """Draw digits, as large as asked: float32 [batch, side, side, 3], and int32 [batch]."""
    images, labels = map(jnp.asarray, digits())
    drawn = jax.random.randint(key, (batch,), 0, len(labels))
    large = jax.image.resize(images[drawn], (batch, side, side), "linear")
    return jnp.repeat(large[..., None], 3, axis=-1), labels[drawn]


def patches(key: jax.Array, batch: int, side: int) -> jax.Array:
    """Draw square pieces of the photographs: float32 [batch, side, side, 3]."""
    whole = jnp.asarray(photographs())
    count, height, width, _ = whole.shape
    which, rows, columns = jax.random.split(key, 3)

    def piece(picture: Any, row: Any, column: Any) -> jax.Array:
        start = (picture, row, column, 0)
        return jax.lax.dynamic_slice(whole, start, (1, side, side, 3))[0]

    return jax.vmap(piece)(
        jax.random.randint(which, (batch,), 0, count),
        jax.random.randint(rows, (batch,), 0, height - side + 1),
        jax.random.randint(columns, (batch,), 0, width - side + 1),
    )
