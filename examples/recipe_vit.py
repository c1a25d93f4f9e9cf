"""A vision transformer in equinox, on scikit-learn's handwritten digits.

python -m examples.recipe_vit
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from examples.side_by_side import Recipe, main

WIDTH, HEADS, LAYERS, BATCH = 96, 4, 3, 64
PIXELS, LABELS = load_digits(return_X_y=True)
IMAGES = (PIXELS / 16).astype(np.float32).reshape(-1, 8, 8)


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=first)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=second)

    def __call__(self, x):
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(lambda t: self.mlp(self.norm2(t)))(x)


class ViT(eqx.Module):
    embed: eqx.nn.Linear
    position: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        first, second, third, *keys = jax.random.split(key, 3 + LAYERS)
        self.embed = eqx.nn.Linear(4, WIDTH, key=first)
        self.position = 0.02 * jax.random.normal(second, (16, WIDTH))
        self.blocks = [Block(key) for key in keys]
        self.norm, self.head = eqx.nn.LayerNorm(WIDTH), eqx.nn.Linear(WIDTH, 10, key=third)

    def __call__(self, image):
        patches = image.reshape(4, 2, 4, 2).swapaxes(1, 2).reshape(16, 4)
        x = jax.vmap(self.embed)(patches) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(0)))


ARRAYS, STATIC = eqx.partition(ViT(jax.random.key(0)), eqx.is_array)
OPTIMIZER = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, 20, 200))


def loss(arrays, batch):
    images, labels = batch
    logits = jax.vmap(eqx.combine(arrays, STATIC))(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def step(state, batch):
    arrays, opt_state = state
    value, grads = jax.value_and_grad(loss)(arrays, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, arrays)
    return (optax.apply_updates(arrays, updates), opt_state), value


def start():
    arrays = jax.tree.map(jnp.copy, ARRAYS)
    return arrays, OPTIMIZER.init(arrays)


def batches(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        chosen = rng.integers(0, len(LABELS), BATCH)
        yield IMAGES[chosen], LABELS[chosen]


RECIPE = Recipe("a ViT in equinox", start, step, batches, 200)

if __name__ == "__main__":
    main(RECIPE)
