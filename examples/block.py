"""One attention block: the program that docs/insight.md looks at.

python -m jaxamp report examples/block.py:loss --args examples/block.py:inputs --grad
"""

import jax
import jax.numpy as jnp

WIDTH = 64


def norm(x, scale):
    centred = x - x.mean(-1, keepdims=True)
    return scale * centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def attention(x, params):
    query, key, value = jnp.split(x @ params["qkv"], 3, axis=-1)
    weights = jax.nn.softmax(query @ key.T / WIDTH**0.5)
    return weights @ value @ params["out"]


def loss(params, x, y):
    with jax.named_scope("attention"):
        x = x + attention(norm(x, params["scale"]), params)
    with jax.named_scope("mlp"):
        x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    return jnp.mean((x - y) ** 2)


def inputs():
    """Parameters, a sequence of 32 vectors, and what they should become."""
    shapes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    x, y = jax.random.normal(jax.random.key(1), (2, 32, WIDTH))
    return {**params, "scale": jnp.ones(WIDTH)}, x, y
