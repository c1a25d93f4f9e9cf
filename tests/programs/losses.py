"""Losses and metrics at the end of a product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import Array

from tests.programs.registry import Draw, program


def _classify(d: Draw) -> tuple:
    return d.normal(6, 8), d.weight(8, 5), d.integers(5, 6)


def _regress(d: Draw) -> tuple:
    return d.normal(6, 8), d.weight(8, 3), d.normal(6, 3)


@program(_classify, low_dots=1)
def cross_entropy(x: Array, w: Array, labels: Array) -> Array:
    """log_softmax and take_along_axis."""
    logp = jax.nn.log_softmax(x @ w)
    return -jnp.take_along_axis(logp, labels[:, None], axis=1).mean()


@program(_classify, low_dots=1)
def cross_entropy_smoothed(x: Array, w: Array, labels: Array) -> Array:
    """One-hot labels, smoothed."""
    target = 0.9 * jax.nn.one_hot(labels, 5) + 0.02
    return -(target * jax.nn.log_softmax(x @ w)).sum(-1).mean()


@program(_classify, low_dots=1)
def cross_entropy_optax(x: Array, w: Array, labels: Array) -> Array:
    """The loss of optax."""
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()


@program(_regress, low_dots=1)
def mean_squared_error(x: Array, w: Array, y: Array) -> Array:
    """The square of a difference, averaged."""
    return jnp.mean((x @ w - y) ** 2)


@program(_regress, low_dots=1)
def huber(x: Array, w: Array, y: Array) -> Array:
    """Two branches by where."""
    return optax.huber_loss(x @ w, y).mean()


@program(_regress, low_dots=1)
def binary_cross_entropy(x: Array, w: Array, y: Array) -> Array:
    """log(sigmoid) and log(1 - sigmoid), clipped as users do."""
    p = jnp.clip(jax.nn.sigmoid(x @ w), 1e-7, 1 - 1e-7)
    target = (y > 0).astype(jnp.float32)
    return -(target * jnp.log(p) + (1 - target) * jnp.log(1 - p)).mean()


@program(_regress, low_dots=1)
def kl_divergence(x: Array, w: Array, y: Array) -> Array:
    """p log p with an epsilon inside the logarithm."""
    p, q = jax.nn.softmax(y), jax.nn.softmax(x @ w)
    return (p * (jnp.log(p + 1e-8) - jnp.log(q + 1e-8))).sum(-1).mean()


@program(lambda d: (d.normal(6, 8), d.normal(6, 8), d.weight(8, 8)), low_dots=3, tolerance="deep")
def contrastive(a: Array, b: Array, w: Array) -> Array:
    """InfoNCE: normalised embeddings, a small temperature, logsumexp."""
    a, b = a @ w, b @ w
    a, b = a / jnp.linalg.norm(a, axis=1)[:, None], b / jnp.linalg.norm(b, axis=1)[:, None]
    logits = a @ b.T / 0.2
    return (jax.nn.logsumexp(logits, axis=1) - jnp.diagonal(logits)).mean()


@program(_classify, low_dots=1)
def accuracy_and_loss(x: Array, w: Array, labels: Array) -> tuple[Array, dict[str, Array]]:
    """A loss with metrics: a count in floats and an integer argmax."""
    logits = x @ w
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()
    seen = jnp.ones_like(labels, jnp.float32).sum() + 256.0
    return loss / seen, {"seen": seen, "tokens": labels.sum()}
