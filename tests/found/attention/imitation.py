"""The arithmetic of fused attention kernels, on a CPU: what they round, and where.

The forward pass goes over blocks of keys with a running maximum (Milakov and Gimelshein 2018, Dao
2023): operands of 16 bits, float32 accumulators, exponentials rounded to 16 bits before they
multiply values, and not for their sum. The backward pass computes the weights again from `lse`, and
rounds them and the cotangents of the scores before they are contracted; the sum of weights times
their cotangents is that of the output, as it was rounded, times its own. cuDNN reads a bias in 16
bits.

The functions stand in for `jaxamp.found.attention.kernels.composed`, with the same arguments:
inside of `kernels()` every attention that is replaced is computed so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax.numpy as jnp
from jax import Array

from jaxamp.found.attention.kernels import composed
from jaxamp.found.attention.kernels.spec import AttentionSpec, operands_of
from jaxamp.kernels.jax_compat.cudnn_calls import cudnn_lowest

BLOCK = 128


@contextmanager
def kernels(block: int = BLOCK) -> Iterator[None]:
    """Compute attentions as kernels do, in what is traced and lowered inside."""

    plain = composed.forward, composed.backward  # what no kernel takes is computed so

    def ahead(*operands: Any, spec: AttentionSpec, **words: Any) -> Any:
        if operands[0].dtype.itemsize != 2:
            return plain[0](*operands, spec=spec, **words)
        return forward(*operands, spec=spec, block=block)

    def back(*operands: Any, spec: AttentionSpec, bias_grad: bool, **words: Any) -> Any:
        if operands[0].dtype.itemsize != 2:
            return plain[1](*operands, spec=spec, bias_grad=bias_grad, **words)
        return backward(*operands, spec=spec, bias_grad=bias_grad)

    with mock.patch.multiple(composed, forward=ahead, backward=back):
        yield


def forward(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    *,
    spec: AttentionSpec,
    block: int = BLOCK,
    rounds: bool = True,
) -> tuple[Array, Array]:
    """Return the output and lse, as `composed.forward` does.

    Splash attention, interpreted, does not round exponentials; a TPU's own unit does.
    """
    scores = _scores(q, k, bias, spec)
    values = _of_each_query_head(v, q).astype(jnp.float32)
    top = jnp.full((*scores.shape[:-1], 1), -jnp.inf)
    total = jnp.zeros_like(top)
    out = jnp.zeros((*scores.shape[:-1], v.shape[-1]))
    for start in range(0, k.shape[-3], block):
        part = scores[..., start : start + block]
        higher = jnp.maximum(top, part.max(-1, keepdims=True))
        finite = jnp.where(jnp.isinf(higher), 0.0, higher)
        exponentials, shrunk = jnp.exp(part - finite), jnp.exp(top - finite)
        total = total * shrunk + exponentials.sum(-1, keepdims=True)
        added = jnp.einsum(
            "...nts,...snh->...nth",
            _rounded(exponentials, q) if rounds else exponentials,
            values[..., start : start + block, :, :],
        )
        out, top = out * shrunk + added, higher
    out = jnp.swapaxes(out / total, -2, -3).astype(q.dtype)
    return out, (top + jnp.log(total))[..., 0]


def backward(*values: Array, spec: AttentionSpec, bias_grad: bool) -> tuple[Array, ...]:
    """Return the cotangents, as `composed.backward` does."""
    q, k, v, bias, out, lse, dout = operands_of(values, backward=True)
    queries, cotangent = q.astype(jnp.float32), dout.astype(jnp.float32)
    keys, values = (_of_each_query_head(x, q).astype(jnp.float32) for x in (k, v))
    weights = jnp.exp(_scores(q, k, bias, spec) - lse[..., None])
    dv = jnp.einsum("...nts,...tnh->...snh", _rounded(weights, q), cotangent)
    dweights = jnp.einsum("...tnh,...snh->...nts", cotangent, values)
    row = jnp.sum(cotangent * out.astype(jnp.float32), -1)
    dscores = weights * (dweights - jnp.swapaxes(row, -1, -2)[..., None])
    low = _rounded(dscores, q)
    dq = jnp.einsum("...nts,...snh->...tnh", low, keys) * spec.scale
    dk = jnp.einsum("...nts,...tnh->...snh", low, queries) * spec.scale
    found = (dq.astype(q.dtype), _of_each_key_head(dk, k), _of_each_key_head(dv, v))
    return (*found, _summed(_rounded(dscores, q), bias)) if bias_grad else found


def _scores(q: Array, k: Array, bias: Array | None, spec: AttentionSpec) -> Array:
    keys = _of_each_query_head(k, q).astype(jnp.float32)
    scores = jnp.einsum("...tnh,...snh->...nts", q.astype(jnp.float32), keys) * spec.scale
    if bias is not None:
        least = cudnn_lowest(q.dtype)
        scores = scores + _rounded(jnp.clip(bias, least, -least), q)
    seen = spec.seen(*scores.shape[-2:])
    return scores if seen is None else jnp.where(seen, scores, -jnp.inf)


def _rounded(x: Array, like: Array) -> Array:
    return x.astype(like.dtype).astype(jnp.float32)


def _of_each_query_head(x: Array, q: Array) -> Array:
    return jnp.repeat(x, q.shape[-2] // x.shape[-2], axis=-2)


def _of_each_key_head(x: Array, like: Array) -> Array:
    """Sum over the queries of a group, in float32, and round."""
    heads = like.shape[-2]
    parts = x.reshape(*x.shape[:-2], heads, x.shape[-2] // heads, x.shape[-1])
    return parts.sum(-2).astype(like.dtype)


def _summed(x: Array, like: Array) -> Array:
    axes = tuple(i for i, n in enumerate(like.shape) if n != x.shape[i])
    return x.sum(axes, keepdims=True).astype(like.dtype)
