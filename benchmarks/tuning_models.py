"""Programs to tune: each with data that can be drawn anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits


@dataclasses.dataclass(frozen=True)
class Model:
    """A program, what makes its arguments from a seed, and what error is allowed."""

    name: str
    fn: Callable[..., Any]
    args: Callable[[int], tuple[Any, ...]]
    budget: float
    error: Any = "output"


def _normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return scale * jax.random.normal(jax.random.key(seed), shape)


def convolution(x: jax.Array, w: jax.Array) -> jax.Array:
    """A 3x3 convolution over NHWC images."""
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def digits_net(params: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    """Two convolutions and a linear layer: logits of handwritten digits."""
    x = images[..., None]
    with jax.named_scope("first"):
        x = jax.nn.relu(convolution(x, params["a"]))
    with jax.named_scope("second"):
        x = jax.nn.relu(convolution(x, params["b"]))
    with jax.named_scope("head"):
        return jnp.mean(x, axis=(1, 2)) @ params["c"]


def digits_args(seed: int) -> tuple[Any, ...]:
    """One network, and other pictures for each seed."""
    params = {
        "a": _normal(1, 3, 3, 1, 8, scale=0.5),
        "b": _normal(2, 3, 3, 8, 16, scale=0.15),
        "c": _normal(3, 16, 10, scale=0.3),
    }
    pixels, _ = load_digits(return_X_y=True)
    images = np.asarray(pixels, np.float32).reshape(-1, 8, 8) / 16
    chosen = np.random.default_rng(seed).choice(len(images), 32, replace=False)
    return params, jnp.asarray(images[chosen])


def attention(x: jax.Array, w: jax.Array) -> jax.Array:
    """Causal attention of two heads."""
    batch, length, width = x.shape
    q, k, v = jnp.split((x @ w).reshape(batch, length, 2, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, width)


def transformer_loss(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """The next character, by one block of attention and one of two linear layers."""
    x = params["embedding"][tokens[:, :-1]]
    with jax.named_scope("attention"):
        x = x + attention(x, params["qkv"])
    with jax.named_scope("mlp"):
        x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    with jax.named_scope("head"):
        scores = jax.nn.log_softmax(x @ params["embedding"].T)
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))


def transformer_args(seed: int) -> tuple[Any, ...]:
    """One network, and other text for each seed."""
    params = {
        "embedding": _normal(1, 64, 32, scale=0.3),
        "qkv": _normal(2, 32, 96, scale=0.18),
        "up": _normal(3, 32, 64, scale=0.18),
        "down": _normal(4, 64, 32, scale=0.12),
    }
    return params, jax.random.randint(jax.random.key(seed + 100), (4, 17), 0, 64)


def normalized(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Batch normalization with the batch's own statistics."""
    mean = jnp.mean(x, axis=(0, 1, 2))
    variance = jnp.var(x, axis=(0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * gain


def resnet_block(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Two convolutions with normalization, and a shortcut."""
    with jax.named_scope("one"):
        y = jax.nn.relu(normalized(convolution(x, params["a"]), params["g"]))
    with jax.named_scope("two"):
        y = normalized(convolution(y, params["b"]), params["g"])
    with jax.named_scope("pool"):
        return jnp.mean(jax.nn.relu(x + y), axis=(1, 2)) @ params["head"]


def resnet_args(seed: int) -> tuple[Any, ...]:
    """One block, and other activations for each seed."""
    params = {
        "a": _normal(1, 3, 3, 8, 8, scale=0.12),
        "b": _normal(2, 3, 3, 8, 8, scale=0.12),
        "g": jnp.ones(8),
        "head": _normal(3, 8, 4),
    }
    return params, _normal(seed + 100, 8, 8, 8, 8)


def field(t: Any, y: jax.Array, w: tuple[jax.Array, jax.Array]) -> jax.Array:
    """A vector field of two linear layers."""
    return jnp.tanh(y @ w[0]) @ w[1] - 0.5 * y


def solved(w: tuple[jax.Array, jax.Array], y: jax.Array, readout: jax.Array) -> jax.Array:
    """A neural ODE, solved by diffrax in fixed steps, and a linear readout."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field), diffrax.Heun(), 0.0, 2.0, 0.1, y, args=w,
        stepsize_controller=diffrax.ConstantStepSize(),
    )  # fmt: skip
    assert solution.ys is not None
    with jax.named_scope("readout"):
        return solution.ys[-1] @ readout


def ode_args(seed: int) -> tuple[Any, ...]:
    """One field, and other starts for each seed."""
    w = _normal(1, 8, 16, scale=0.4), _normal(2, 16, 8, scale=0.3)
    return w, _normal(seed + 100, 16, 8), _normal(3, 8, 4)


def kernel(x: jax.Array, z: jax.Array) -> jax.Array:
    """Squared exponential, by the expanded square, which cancels."""
    squares = jnp.sum(x**2, -1)[:, None] + jnp.sum(z**2, -1)[None] - 2 * x @ z.T
    return jnp.exp(-0.5 * squares)


def gaussian_process(x: jax.Array, y: jax.Array, z: jax.Array, w: jax.Array) -> jax.Array:
    """Posterior mean by a Cholesky factor, and a projection of it."""
    with jax.named_scope("prior"):
        prior = kernel(x, x) + 0.1 * jnp.eye(len(x))
    with jax.named_scope("solve"):
        weights = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(prior), True), y)
    with jax.named_scope("cross"):
        mean = kernel(z, x) @ weights
    with jax.named_scope("project"):
        return jnp.tanh(mean @ w) @ w.T


def process_args(seed: int) -> tuple[Any, ...]:
    """Other observations for each seed."""
    x, z = _normal(seed + 100, 24, 3), _normal(seed + 200, 16, 3)
    return x, jnp.sin(x @ _normal(1, 3, 4)), z, _normal(2, 4, 4, scale=0.5)


def fragile(x: jax.Array, a: jax.Array, b: jax.Array, w: jax.Array) -> jax.Array:
    """The difference of products by nearly equal arguments, beside products that are harmless."""
    with jax.named_scope("cancelling"):
        small = (x @ a - x @ b) * 1e2
    with jax.named_scope("harmless"):
        large = jnp.tanh(x @ w) @ w.T
    with jax.named_scope("sum"):
        return (small + large) @ w


def fragile_args(seed: int) -> tuple[Any, ...]:
    """Other inputs for each seed."""
    square = (16, 16)
    a, b, w = (_normal(i, *square, scale=0.25) for i in (1, 2, 3))
    return _normal(seed + 100, 32, 16), a, a + 1e-2 * b, w


MODELS = (
    Model("digits conv net", digits_net, digits_args, 4e-3),
    Model("character transformer", transformer_loss, transformer_args, 6e-3, "gradient"),
    Model("ResNet block", resnet_block, resnet_args, 3e-3),
    Model("neural ODE (diffrax)", solved, ode_args, 8e-3),
    Model("Gaussian process", gaussian_process, process_args, 6e-3),
    Model("cancellation", fragile, fragile_args, 5e-3),
    Model("tight: digits conv net", digits_net, digits_args, 1.6e-3),
    Model("tight: character transformer", transformer_loss, transformer_args, 3e-3, "gradient"),
    Model("tight: ResNet block", resnet_block, resnet_args, 5e-4),
    Model("tight: cancellation", fragile, fragile_args, 2.5e-3),
)
