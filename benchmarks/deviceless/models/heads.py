"""The head of a language model with its loss: of all tokens at once, or of chunks of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax

from benchmarks.deviceless.models.fused import FUSED
from benchmarks.deviceless.models.model import (
    HAND,
    Batch,
    Loss,
    Params,
    Size,
    negative_log_likelihood,
)

CHUNKED = "hand, loss in chunks"
CHUNKS = 8
_chunks: ContextVar[int] = ContextVar("chunks", default=1)


def losses(
    head: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    labels: jax.Array,
    loss: Callable[..., jax.Array] = negative_log_likelihood,
) -> jax.Array:
    """The loss of each token.

    A hand `in_chunks` computes it for an eighth of the tokens at a time, under a checkpoint.
    """
    if _chunks.get() == 1:
        return loss(head(x), labels)
    shape = (_chunks.get(), *(1 for _ in x.shape[:-2]), -1)
    each = jax.checkpoint(lambda part: loss(head(part[0]), part[1]))
    found = jax.lax.map(each, (x.reshape(*shape, x.shape[-1]), labels.reshape(shape)))
    return found.reshape(labels.shape)


def in_chunks(hand: Loss) -> Loss:
    """The hand with its `losses` in chunks."""

    def chunked(params: Params, batch: Batch) -> tuple[jax.Array, Any]:
        token = _chunks.set(CHUNKS)
        try:
            return hand(params, batch)
        finally:
            _chunks.reset(token)

    return chunked


def chunked(size: Size) -> Size:
    """A size with one hand more: the one with the strongest attention, with its loss in chunks."""
    strongest = size.hands.get(FUSED, size.hands[HAND])
    return dataclasses.replace(size, hands=size.hands | {CHUNKED: in_chunks(strongest)})
