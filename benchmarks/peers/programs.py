"""The programs as plain functions, in float32 as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def norm(x: Any, scale: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return scale * x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attention(q: Any, k: Any, v: Any, heads: int) -> Any:
    q, k, v = (x.reshape(*x.shape[:-1], heads, -1) for x in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*v.shape[:2], -1)


def layer(x: Any, w: Any, heads: int) -> Any:
    q, k, v = jnp.split(norm(x, w["norm1"]) @ w["qkv"], 3, -1)
    x = x + attention(q, k, v, heads) @ w["out"]
    return x + jax.nn.gelu(norm(x, w["norm2"]) @ w["up"]) @ w["down"]


def cross_entropy(logits: Any, words: Any) -> Any:
    picked = jnp.take_along_axis(logits, words[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def block(heads: int) -> Callable[..., Any]:
    """A transformer whose layers are written out."""

    def loss(params: Any, words: Any) -> Any:
        x = params["embed"][words]
        for index in range(params["layers"]["out"].shape[0]):
            x = layer(x, {k: v[index] for k, v in params["layers"].items()}, heads)
        return cross_entropy(norm(x, params["norm"]) @ params["embed"].T, words)

    return loss


def scanned(heads: int) -> Callable[..., Any]:
    """The same, its layers scanned."""

    def loss(params: Any, words: Any) -> Any:
        x = lax.scan(
            lambda x, w: (layer(x, w, heads), None), params["embed"][words], params["layers"]
        )[0]
        return cross_entropy(norm(x, params["norm"]) @ params["embed"].T, words)

    return loss


def whitened(heads: int) -> Callable[..., Any]:
    """A Cholesky factor of the features' covariance, and one matrix after it."""

    def loss(params: Any, words: Any) -> Any:
        x = params["embed"][words].reshape(-1, params["embed"].shape[1])
        covariance = x.T @ x / len(x) + jnp.eye(x.shape[1])
        factor = jnp.linalg.cholesky(covariance)
        x = lax.linalg.triangular_solve(factor, x.T, left_side=True, lower=True).T
        return cross_entropy(x @ params["layers"]["up"][0], words.reshape(-1))

    return loss


FUNCTIONS = {"block": block, "scanned": scanned, "whitened": whitened}
