"""What a model of this benchmark is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Params = Any
Batch = Any
HAND = "hand-written"
Loss = Callable[[Params, Batch], tuple[jax.Array, Any]]
"""From parameters and a batch to the scalar loss and what else the model returns."""


@dataclass(frozen=True, slots=True)
class Size:
    """One size of a model: how to make its parameters and its batches, and its versions.

    ``hands`` are bfloat16 versions by hand; the first one is what jaxamp is compared with.
    Without ``gradient`` a program is compared as it is, not its value and gradient.
    """

    init: Callable[[jax.Array], Params]
    sample: Callable[[jax.Array], Batch]
    plain: Loss
    hands: dict[str, Loss]
    gradient: bool = True


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes of a transformer."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model at the size that is compiled, and small enough to be trained on a CPU."""

    name: str
    title: str
    full: Size
    small: Size
    learning_rate: float = 1e-3


def weights(key: jax.Array, count: int) -> Callable[..., jax.Array]:
    """Draws so many weights of given shapes, of variance one over how many a product adds up."""
    keys = iter(jax.random.split(key, count))

    def draw(*shape: int, added: int | None = None) -> jax.Array:
        added = added or shape[max(len(shape) - 2, 0)]
        return added**-0.5 * jax.random.normal(next(keys), shape)

    return draw


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean negative log-likelihood of integer labels, computed in float32 at least."""
    return negative_log_likelihood(logits, labels).mean()


def negative_log_likelihood(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Of each integer label, computed in float32 at least."""
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    log_probabilities = jax.nn.log_softmax(logits.astype(wide))
    return -jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1)[..., 0]


def chain_of_tokens(key: jax.Array, batch: int, length: int, vocabulary: int) -> jax.Array:
    """Sequences that a language model can learn: most tokens follow from the one before.

    Returns int32 of shape [batch, length].
    """
    start, noise, surprise = jax.random.split(key, 3)
    successor = jax.random.permutation(jax.random.key(7), vocabulary)
    first = jax.random.randint(start, (batch,), 0, vocabulary)
    random = jax.random.randint(noise, (length, batch), 0, vocabulary)
    surprised = jax.random.bernoulli(surprise, 0.1, (length, batch))

    def step(token: jax.Array, drawn: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        following = jnp.where(drawn[1], drawn[0], successor[token])
        return following, following

    _, tokens = jax.lax.scan(step, first, (random, surprised))
    return tokens.T.astype(jnp.int32)


def labelled_images(
    key: jax.Array, batch: int, side: int, classes: int
) -> tuple[jax.Array, jax.Array]:
    """Images that a classifier can learn: a smooth pattern for each class, under noise.

    Returns float32 [batch, side, side, 3] and int32 [batch].
    """
    label, noise = jax.random.split(key)
    labels = jax.random.randint(label, (batch,), 0, classes)
    coarse = jax.random.normal(jax.random.key(7), (classes, 4, 4, 3))
    patterns = jax.image.resize(coarse[labels], (batch, side, side, 3), "linear")
    return patterns + jax.random.normal(noise, patterns.shape), labels
