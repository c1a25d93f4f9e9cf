"""Layers that many programs share, in plain jax.numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def mlp(layers: Any, x: Array, act: Any = jax.nn.relu) -> Array:
    """Dense layers with `act` between them."""
    for w, b in layers[:-1]:
        x = act(x @ w + b)
    w, b = layers[-1]
    return x @ w + b


def layer_norm(x: Array) -> Array:
    """A norm over the last axis, without scale and bias."""
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)


def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    """Softmax attention over the second to last axis."""
    logits = q @ jnp.swapaxes(k, -1, -2) / jnp.sqrt(q.shape[-1])
    if mask is not None:
        logits = jnp.where(mask, logits, -1e9)
    return jax.nn.softmax(logits, axis=-1) @ v


def causal(length: int) -> Array:
    """A mask of what has been seen."""
    return jnp.tril(jnp.ones((length, length), bool))


def conv(x: Array, w: Array, stride: int = 1, padding: Any = "SAME") -> Array:
    """A two-dimensional convolution of images [n, h, w, c]."""
    return lax.conv_general_dilated(
        x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def conv1d(x: Array, w: Array, stride: int = 1, dilation: int = 1, padding: Any = "SAME") -> Array:
    """A convolution of sequences [n, t, c]; `CAUSAL` pads on the left alone."""
    if padding == "CAUSAL":
        padding = [((w.shape[0] - 1) * dilation, 0)]
    return lax.conv_general_dilated(
        x, w, (stride,), padding, rhs_dilation=(dilation,), dimension_numbers=("NWC", "WIO", "NWC")
    )


def gru(params: Any, h: Array, x: Array) -> Array:
    """A GRU cell; params are an input matrix [n, 3h], a recurrent one [h, 3h] and a bias."""
    wx, wh, b = params
    xr, xz, xn = jnp.split(x @ wx + b, 3, -1)
    hr, hz, hn = jnp.split(h @ wh, 3, -1)
    r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
    return (1 - z) * jnp.tanh(xn + r * hn) + z * h


def lstm(params: Any, state: tuple[Array, Array], x: Array) -> tuple[Array, Array]:
    """An LSTM cell; params as of `gru`, with 4h columns."""
    wx, wh, b = params
    h, c = state
    i, f, g, o = jnp.split(x @ wx + h @ wh + b, 4, -1)
    c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def nll(logits: Array, labels: Array) -> Array:
    """The mean cross entropy of integer labels."""
    logp = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logp, labels[..., None], -1).mean()
