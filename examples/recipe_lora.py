"""A LoRA fine-tune in plain JAX: a network that knows digits upright learns them turned.

    python -m examples.recipe_lora

The network is trained first. Then its weights are frozen, and each gets a product of two thin
matrices that is added to it: these alone are trained, by images turned by a quarter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from examples.side_by_side import Recipe, main

SIZES, RANK, BATCH = (64, 512, 512, 512, 10), 8, 128
PIXELS, LABELS = load_digits(return_X_y=True)
UPRIGHT = (PIXELS / 16).astype(np.float32)
TURNED = np.ascontiguousarray(np.rot90(UPRIGHT.reshape(-1, 8, 8), axes=(1, 2))).reshape(-1, 64)
OPTIMIZER = optax.adam(2e-3)


def layer(x, w, thin=None):
    product = x @ w
    return product if thin is None else product + (x @ thin["down"]) @ thin["up"]


def network(weights, x, thin=None):
    for index, w in enumerate(weights):
        with jax.named_scope(f"layer{index}"):
            x = layer(x, w, thin and thin[index])
        x = jax.nn.relu(x) if index < len(weights) - 1 else x
    return x


def loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def batches(images, steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        chosen = rng.integers(0, len(LABELS), BATCH)
        yield images[chosen], LABELS[chosen]


@functools.cache
def pretrained():
    """The network as it learnt the upright digits, in float32."""
    keys = jax.random.split(jax.random.key(0), len(SIZES))
    init = jax.nn.initializers.he_normal()
    pairs = zip(keys, SIZES[:-1], SIZES[1:], strict=False)
    weights = [init(key, (rows, columns)) for key, rows, columns in pairs]
    state = OPTIMIZER.init(weights)

    @jax.jit
    def step(weights, state, images, labels):
        grads = jax.grad(lambda w: loss(network(w, images), labels))(weights)
        updates, state = OPTIMIZER.update(grads, state)
        return optax.apply_updates(weights, updates), state

    for images, labels in batches(UPRIGHT, 150):
        weights, state = step(weights, state, images, labels)
    return weights


def start():
    weights = jax.tree.map(jnp.copy, pretrained())
    keys = jax.random.split(jax.random.key(1), len(weights))
    thin = [
        {
            "down": jax.random.normal(key, (len(w), RANK)) / len(w) ** 0.5,
            "up": jnp.zeros((RANK, w.shape[1])),
        }
        for key, w in zip(keys, weights, strict=True)
    ]
    return weights, thin, OPTIMIZER.init(thin)


def step(state, batch):
    weights, thin, opt_state = state
    images, labels = batch
    value, grads = jax.value_and_grad(lambda t: loss(network(weights, images, t), labels))(thin)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return (weights, optax.apply_updates(thin, updates), opt_state), value


RECIPE = Recipe("a LoRA fine-tune", start, step, functools.partial(batches, TURNED), 200)

if __name__ == "__main__":
    main(RECIPE)
