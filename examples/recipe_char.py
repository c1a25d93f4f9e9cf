"""A character model in flax nnx: a causal transformer on the help texts that come with Python.

python -m examples.recipe_char
"""

from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.side_by_side import Recipe, main

LENGTH, WIDTH, HEADS, LAYERS, BATCH = 48, 96, 4, 2, 24
TEXT = "\n".join(topics[name] for name in sorted(topics))
ALPHABET = sorted(set(TEXT))
CODES = np.array([ALPHABET.index(c) for c in TEXT], np.int32)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class CharModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(len(ALPHABET), WIDTH, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, codes):
        x = self.embed(codes) + self.position(jnp.arange(LENGTH))
        mask = nnx.make_causal_mask(codes)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


GRAPH, PARAMS = nnx.split(CharModel(nnx.Rngs(0)))
OPTIMIZER = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 4e-3, 20, 200))


def loss(params, windows):
    logits = nnx.merge(GRAPH, params)(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def step(state, windows):
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, windows)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


def start():
    params = jax.tree.map(jnp.copy, PARAMS)
    return params, OPTIMIZER.init(params)


def batches(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        starts = rng.integers(0, len(CODES) - LENGTH - 1, BATCH)
        yield CODES[starts[:, None] + np.arange(LENGTH + 1)]


RECIPE = Recipe("a character model in flax nnx", start, step, batches, 200)

if __name__ == "__main__":
    main(RECIPE)
