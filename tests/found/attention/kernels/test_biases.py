"""Attention is fused with biases of all scores, of heads, and of keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxamp

POLICY = jaxamp.PrecisionPolicy.MIXED_BF16.replace(fused_attention=True)
B, T, N, H = 2, 32, 4, 8
X = jax.ShapeDtypeStruct((B, T, N, H), jnp.float32)
OF_ALL, OF_HEADS, OF_KEYS = (B, N, T, T), (1, N, T, T), (B, 1, 1, T)


def attend(q: Any, k: Any, v: Any, *biases: Any) -> Any:
    scores = sum(biases, jnp.einsum("bqnh,bknh->bnqk", q, k))
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores), v)


def loss(*args: Any) -> Any:
    return jnp.sum(jnp.sin(attend(*args)))


def planned(fn: Any, *shapes: tuple[int, ...]) -> Any:
    biases = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jaxamp.plan_of(fn, POLICY)(X, X, X, *biases)


@pytest.mark.parametrize(
    "shapes", [(OF_ALL,), (OF_HEADS,), (OF_KEYS,), (OF_HEADS, OF_KEYS), (OF_ALL, OF_ALL)]
)
@pytest.mark.parametrize("fn", [attend, jax.grad(loss, (0, 1, 2, 3))])
def test_biases_are_no_obstacle(fn: Any, shapes: Any) -> None:
    assert len(planned(fn, *shapes).found) == 1
