"""Small programs that reports are made of, and what they are given."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def spec(*shape: int) -> jax.ShapeDtypeStruct:
    """A float32 array that is not there."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """One product and its activation."""
    with jax.named_scope("layer"):
        return jnp.tanh(x @ w)


def mlp_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Two layers and a mean square."""
    hidden = jax.nn.relu(x @ params["w1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


def attention(x: jax.Array, w: jax.Array) -> jax.Array:
    """Attention over one sequence, with a norm before it."""
    with jax.named_scope("norm"):
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    with jax.named_scope("attention"):
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        return jnp.sum(jax.nn.softmax(q @ k.T / 4.0) @ v)


def gated(x: jax.Array, w: jax.Array) -> jax.Array:
    """A gated layer: its fused group is computed again in the backward pass."""
    gate, value = jnp.split(x @ w, 2, axis=-1)
    return jnp.sum(jnp.square((jax.nn.silu(gate) * value) @ w[:, :16].T))


def scanned(x: jax.Array, weights: jax.Array) -> jax.Array:
    """A loss over layers that share their code."""
    return jnp.sum(jax.lax.scan(lambda h, w: (layer(h, w), None), x, weights)[0] ** 2)


def branching(flag: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
    """A branch that multiplies, and one that does not."""
    return jax.lax.cond(flag, lambda: jnp.sum((x @ w) @ w), lambda: jnp.sum(x))


def calls(x: jax.Array, w: jax.Array) -> jax.Array:
    """One jitted function, called twice, under remat."""
    step = jax.jit(layer)
    return jnp.sum(jax.checkpoint(lambda h: step(step(h, w), w))(x))


def convolution(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """A strided convolution and a global mean."""
    out = jax.lax.conv_general_dilated(
        images, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.mean(jax.nn.gelu(out))


MLP = ({"w1": spec(8, 16), "w2": spec(16, 1)}, spec(4, 8), spec(4, 1))
PROGRAMS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "layer": (layer, (spec(4, 8), spec(8, 16))),
    "mlp": (mlp_loss, MLP),
    "attention": (attention, (spec(16, 8), spec(8, 48))),
    "gated": (gated, (spec(4, 8), spec(8, 32))),
    "scanned": (scanned, (spec(4, 8), spec(5, 8, 8))),
    "calls": (calls, (spec(4, 8), spec(8, 8))),
    "convolution": (convolution, (spec(2, 8, 8, 3), spec(3, 3, 3, 4))),
}
"""Name to function and arguments; the first argument can be differentiated."""
