"""A two-layer network on scikit-learn's digits, trained for many seeds at once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxamp

BATCH = 32
HELD_OUT = 360


@functools.cache
def data() -> tuple[np.ndarray, ...]:
    """Training images and labels, then those held out."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    return images[HELD_OUT:], labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT]


def init(key: Any, width: int) -> dict[str, jax.Array]:
    """Weights in float32."""
    keys = jax.random.split(key)
    return {
        "w1": jax.random.normal(keys[0], (64, width)) * (2 / 64) ** 0.5,
        "b1": jnp.zeros(width),
        "w2": jax.random.normal(keys[1], (width, 10)) * (1 / width) ** 0.5,
        "b2": jnp.zeros(10),
    }


def logits(params: dict[str, jax.Array], images: Any) -> jax.Array:
    """Computed in the dtype of the parameters."""
    x = images.astype(params["w1"].dtype)
    x = jax.nn.relu(x @ params["w1"] + params["b1"])
    return (x @ params["w2"] + params["b2"]).astype(jnp.float32)


def loss_fn(params: dict[str, jax.Array], images: Any, labels: Any) -> jax.Array:
    """Mean cross-entropy."""
    rows = logits(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(rows, labels).mean()


@functools.partial(jax.jit, static_argnames=("make_optimizer", "dtype", "steps", "width", "seeds"))
def train(
    make_optimizer: Any, *, dtype: Any, steps: int, width: int = 32, seeds: int = 5
) -> dict[str, jax.Array]:
    """Final training loss and held-out accuracy, for each seed."""
    images, labels, test_images, test_labels = map(jnp.asarray, data())

    def of_seed(seed: jax.Array) -> dict[str, jax.Array]:
        init_key, data_key = jax.random.split(jax.random.key(seed))
        params = jax.tree.map(lambda w: w.astype(dtype), init(init_key, width))
        optimizer = make_optimizer()

        def step(carry: Any, key: Any) -> Any:
            params, state = carry
            batch = jax.random.randint(key, (BATCH,), 0, len(labels))
            grads = jax.grad(loss_fn)(params, images[batch], labels[batch])
            updates, state = optimizer.update(grads, state, params)
            return (jaxamp.apply_updates(params, updates), state), None

        keys = jax.random.split(data_key, steps)
        (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), keys)
        wide = jax.tree.map(lambda w: w.astype(jnp.float32), params)
        accuracy = jnp.mean(jnp.argmax(logits(wide, test_images), axis=-1) == test_labels)
        return {"loss": loss_fn(wide, images, labels), "accuracy": accuracy}

    return jax.vmap(of_seed)(jnp.arange(seeds))
