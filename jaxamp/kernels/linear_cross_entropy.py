"""A linear layer and its softmax cross-entropy, a chunk of the vocabulary at a time.

XLA alone, for what is gained is memory. There is no primitive of its own: ``amp`` then sees the
dots within and gives them the policy's precision, which an opaque one would forbid.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxamp.errors import KernelError
from jaxamp.kernels.config import KernelConfig, resolve

NAME = "linear_cross_entropy"
F32 = np.dtype(np.float32)
_LOGITS = 2**24  # numbers in a chunk of logits: 64 MiB, a choice of how much memory is little
_UNIT = 128


def linear_cross_entropy(
    x: Any, weight: Any, labels: Any, bias: Any = None, *, config: KernelConfig | None = None
) -> jax.Array:
    """Compute the softmax cross-entropy of ``x @ weight + bias`` without storing the logits.

    The forward pass keeps a running maximum and sum (Milakov and Gimelshein 2018,
    arXiv:1805.02867); the backward pass computes each chunk of logits once more.

    Args:
      x: floats of shape (..., features).
      weight: shape (features, vocabulary), of the dtype of ``x``.
      labels: integers of shape (...); where negative, loss and gradient are zero.
      bias: shape (vocabulary,).
      config: ``tile`` is (chunk,), how much of the vocabulary is computed at once; left out, as
        much as makes 64 MiB of logits.

    Returns:
      float32 of shape (...), the loss at each position. Logits, sums and the gradient of ``x`` are
      accumulated in float32 whatever the dtype of the operands.

    Raises:
      KernelError: shapes do not fit, or a Pallas kernel is asked for.

    >>> x, weight = jnp.ones((2, 3)), jnp.zeros((3, 4))
    >>> linear_cross_entropy(x, weight, jnp.array([1, -1]))
    Array([1.3862944, 0.       ], dtype=float32)
    """
    x, weight, labels = jnp.asarray(x), jnp.asarray(weight), jnp.asarray(labels)
    chosen = resolve(config, NAME)
    _check(x, weight, labels, bias, chosen)
    bias = jnp.zeros(weight.shape[1], F32) if bias is None else jnp.asarray(bias)
    rows = x.reshape(-1, x.shape[-1])
    chunk = _chunk(chosen, rows.shape[0], weight.shape[1])
    with jax.named_scope(NAME):
        loss: Any = _loss(chunk, rows, weight, bias, labels.reshape(-1))
    return loss.reshape(labels.shape)


def _check(x: jax.Array, weight: jax.Array, labels: jax.Array, bias: Any, config: Any) -> None:
    fits = weight.ndim == 2 and x.ndim > 0 and x.shape[-1] == weight.shape[0]
    if not fits or labels.shape != x.shape[:-1]:
        raise KernelError(
            f"{NAME} takes x (..., features), weight (features, vocabulary) and labels (...); got "
            f"{x.shape}, {weight.shape} and {labels.shape}."
        )
    if bias is not None and jnp.shape(bias) != weight.shape[1:]:
        raise KernelError(f"{NAME}: the bias has shape {weight.shape[1:]}, not {jnp.shape(bias)}.")
    if not jnp.issubdtype(labels.dtype, np.integer):
        raise KernelError(f"{NAME}: labels are integers, not {labels.dtype}.")
    if x.dtype != weight.dtype or not jnp.issubdtype(x.dtype, np.floating):
        raise KernelError(
            f"{NAME}: x and weight are floats of one dtype, not {x.dtype} and {weight.dtype}."
        )
    if config.backend in ("pallas", "interpret"):
        raise KernelError(f"{NAME} has no Pallas kernel; backend is 'auto' or 'reference'.")
    if config.tile is not None and len(config.tile) != 1:
        raise KernelError(f"{NAME}: tile={config.tile} should be (chunk,).")


def _chunk(config: KernelConfig, rows: int, vocabulary: int) -> int:
    fitting = config.tile[0] if config.tile else _LOGITS // max(rows, 1) // _UNIT * _UNIT
    return min(max(fitting, 1 if config.tile else _UNIT), vocabulary)


class _Chunk(NamedTuple):
    """One chunk of the vocabulary."""

    start: Any
    weight: jax.Array
    logits: jax.Array

    def hits(self, labels: jax.Array) -> jax.Array:
        """Return a mask of the positions of the labels."""
        return (labels - self.start)[:, None] == jnp.arange(self.weight.shape[1])


def _over_chunks(
    body: Callable[[Any, _Chunk], Any],
    carry: Any,
    chunk: int,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
) -> Any:
    """Fold ``body`` over the vocabulary; what is left at its end is one smaller chunk."""
    vocabulary = weight.shape[1]

    def step(carry: Any, start: Any, width: int) -> Any:
        part = lax.dynamic_slice_in_dim(weight, start, width, 1)
        logits = _kept(jnp.matmul(x, part, preferred_element_type=F32))
        shifted = logits + lax.dynamic_slice_in_dim(bias, start, width).astype(F32)
        return body(carry, _Chunk(start, part, shifted))

    count, rest = divmod(vocabulary, chunk)
    starts = jnp.arange(count) * chunk
    carry, _ = lax.scan(lambda c, start: (step(c, start, chunk), None), carry, starts)
    return step(carry, count * chunk, rest) if rest else carry


def _kept(logits: jax.Array) -> jax.Array:
    """Return the same numbers, which ``amp`` then leaves in float32: their exponential is taken.

    A rounding that a program asks for is kept by every policy, so the dot before it gives its
    accumulator; a rounding of float32 to float32 costs nothing.
    """
    return lax.reduce_precision(logits, exponent_bits=8, mantissa_bits=23)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(chunk: int, x: Any, weight: Any, bias: Any, labels: Any) -> jax.Array:
    return _forward(chunk, x, weight, bias, labels)[0]


def _forward(chunk: int, x: Any, weight: Any, bias: Any, labels: Any) -> Any:
    def body(carry: Any, part: _Chunk) -> Any:
        largest, total, picked = carry
        top = jnp.maximum(largest, jnp.max(part.logits, axis=1))
        base = jnp.where(jnp.isfinite(top), top, 0)  # a row of -inf so far
        total = total * jnp.exp(largest - base)
        total += jnp.sum(jnp.exp(part.logits - base[:, None]), axis=1)
        picked += jnp.sum(jnp.where(part.hits(labels), part.logits, 0), axis=1)
        return top, total, picked

    zero = jnp.zeros_like(x, F32, shape=x.shape[:1])
    start = (jnp.full_like(zero, -np.inf), zero, zero)
    largest, total, picked = _over_chunks(body, start, chunk, x, weight, bias)
    norm = largest + jnp.log(total)
    loss = jnp.where(labels < 0, 0, norm - picked)
    return loss, (x, weight, bias, labels, norm)


def _backward(chunk: int, residuals: Any, cotangent: Any) -> Any:
    x, weight, bias, labels, norm = residuals
    scale = jnp.where(labels < 0, 0, cotangent)[:, None]

    def body(carry: Any, part: _Chunk) -> Any:
        dx, dweight, dbias = carry
        softmax = jnp.exp(part.logits - norm[:, None])
        dlogits = (softmax - part.hits(labels)) * scale
        narrow = dlogits.astype(x.dtype)
        dx += jnp.matmul(narrow, part.weight.T, preferred_element_type=F32)
        own = jnp.matmul(x.T, narrow, preferred_element_type=F32).astype(weight.dtype)
        own_bias = jnp.sum(dlogits, axis=0).astype(bias.dtype)
        dweight = lax.dynamic_update_slice_in_dim(dweight, own, part.start, 1)
        return dx, dweight, lax.dynamic_update_slice_in_dim(dbias, own_bias, part.start, 0)

    zeros = jnp.zeros_like(x, F32), jnp.zeros_like(weight), jnp.zeros_like(bias)
    dx, dweight, dbias = _over_chunks(body, zeros, chunk, x, weight, bias)
    return dx.astype(x.dtype), dweight, dbias, np.zeros(labels.shape, jax.dtypes.float0)


_loss.defvjp(_forward, _backward)
