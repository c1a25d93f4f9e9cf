"""A two-layer network on scikit-learn's digits, trained for many seeds at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
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


def init(rng: np.random.Generator, width: int) -> dict[str, np.ndarray]:
    """Weights in float32."""
    params = {
        "w1": rng.normal(size=(64, width)) * (2 / 64) ** 0.5,
        "b1": np.zeros(width),
        "w2": rng.normal(size=(width, 10)) * (1 / width) ** 0.5,
        "b2": np.zeros(10),
    }
    return {name: value.astype(np.float32) for name, value in params.items()}


def logits(params: dict[str, jax.Array], images: Any) -> jax.Array:
    """Computed in the dtype of the parameters."""
    x = images.astype(params["w1"].dtype)
    x = jax.nn.relu(x @ params["w1"] + params["b1"])
    return (x @ params["w2"] + params["b2"]).astype(jnp.float32)


def loss_fn(params: dict[str, jax.Array], images: Any, labels: Any) -> jax.Array:
    """Mean cross-entropy."""
    rows = logits(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(rows, labels).mean()


def train(
    make_optimizer: Callable[[], Any], *, dtype: Any, steps: int, width: int = 32, seeds: int = 5
) -> dict[str, np.ndarray]:
    """Final training loss and held-out accuracy, for each seed."""
    images, labels, test_images, test_labels = map(jnp.asarray, data())
    rngs = [np.random.default_rng(seed) for seed in range(seeds)]
    first = jax.tree.map(lambda *w: jnp.stack(w).astype(dtype), *(init(r, width) for r in rngs))
    batches = np.stack([r.integers(len(labels), size=(steps, BATCH)) for r in rngs])
    optimizer = make_optimizer()

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        grads = jax.grad(loss_fn)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return (jaxamp.apply_updates(params, updates), state), None

    @jax.jit
    @jax.vmap
    def of_seed(params: Any, images: Any, labels: Any) -> Any:
        return jax.lax.scan(step, (params, optimizer.init(params)), (images, labels))[0][0]

    @jax.jit
    @jax.vmap
    def score(params: Any) -> Any:
        right = jnp.argmax(logits(params, test_images), axis=-1) == test_labels
        return {"loss": loss_fn(params, images, labels), "accuracy": jnp.mean(right)}

    params = of_seed(first, images[batches], labels[batches])
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), params)
    return jax.tree.map(np.asarray, score(wide))
