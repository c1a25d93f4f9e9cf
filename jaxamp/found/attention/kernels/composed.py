"""Attention written with JAX's own operations: what the kernels compute, and runs without one.

Products are accumulated in float32 and the softmax is float32; weights and cotangents of scores are
rounded to the operands' dtype before they are contracted, as by every kernel. What has the size of
scores is in memory here: products of that size are rounded to bfloat16, if the operands are that,
and the backward pass computes the weights as the forward pass did, so that XLA merges the two. With
``widen`` the contractions read float32, and nothing of that size is rounded but what is contracted:
where a backend lacks a product of 16-bit operands, or where JAX derives further products of float32
cotangents. With ``along`` rows of scores lie along memory, which is for one device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from jaxamp.found.attention.kernels.spec import AttentionSpec, bits_of, operands_of

Array = Any


def forward(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    *,
    spec: AttentionSpec,
    widen: bool = False,
    along: bool = False,
) -> tuple[Array, Array]:
    """Return the output, and the bits of the logarithm of the sum of exponentials of each row."""
    scores = _scores(_grouped(q, k), k, bias, spec, widen, along)
    weights, lse = _softmax(scores, None if widen else q.dtype)
    out = _contract("...kgts,...skh->...tkgh", weights.astype(q.dtype), v, widen)
    return _flat_heads(out, -2).astype(q.dtype), bits_of(_flat_heads(lse[..., 0], -2))


def backward(
    *values: Array, spec: AttentionSpec, bias_grad: bool, widen: bool = False, along: bool = False
) -> tuple[Array, ...]:
    """Return the cotangents of q, k, v, and with `bias_grad` that of the bias.

    The values are those that `operands_of` names. With `widen` those of the forward pass are not
    read: JAX derives further products of this.
    """
    q, k, v, bias, out, _, dout = operands_of(values, backward=True)
    queries, cotangent = _grouped(q, k), _grouped(dout, k)
    low = None if widen else q.dtype
    weights, _ = _softmax(_scores(queries, k, bias, spec, widen, along), low)
    dv = _contract("...kgts,...tkgh->...skh", weights.astype(q.dtype), cotangent, widen, v)
    dweights = _stored(_pairs(cotangent, v, widen, along), low)
    weights = weights.astype(dweights.dtype)
    if widen:
        row = jnp.sum(weights * dweights, axis=-1, keepdims=True)
    else:  # the same number, of what is as wide as a head rather than as long as a row
        row = _contract("...tkgh,...tkgh->...kgt", cotangent, _grouped(out, k), widen)[..., None]
    dscores = weights * (dweights - row)
    scaled = (dscores * spec.scale).astype(q.dtype)
    dq = _flat_heads(_contract("...kgts,...skh->...tkgh", scaled, k, widen), -2)
    dk = _contract("...kgts,...tkgh->...skh", scaled, queries, widen, k)
    found = (dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype))
    return (*found, sum_to(_flat_heads(dscores, -3), bias)) if bias_grad else found


def _scores(
    queries: Array, k: Array, bias: Array | None, spec: AttentionSpec, widen: bool, along: bool
) -> Array:
    """Return [*b, K, N // K, T, S], scaled, biased and masked, in float32."""
    products = _pairs(queries, k, widen, along)
    scores = _stored(products, None if widen else queries.dtype) * spec.scale
    if bias is not None:
        scores = scores + _grouped_bias(bias, k).astype(scores.dtype)
    seen = spec.seen(*scores.shape[-2:])
    return scores if seen is None else jnp.where(seen, scores, -np.inf)


def _softmax(scores: Array, dtype: Any) -> tuple[Array, Array]:
    """Return the weights, and the logarithm of the sum of exponentials of each row.

    Rounded, if a dtype is given, the weights are behind a barrier: XLA stores nothing wider.
    """
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    exponentials = jnp.exp(scores - top)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    weights = exponentials / total
    if dtype is not None:
        weights = jax.lax.optimization_barrier(weights.astype(dtype))
    return weights, top + jnp.log(total)


def _stored(products: Array, dtype: Any) -> Array:
    """Return float32 products rounded to a dtype of the same range: no number overflows."""
    if dtype is None or jnp.finfo(dtype).maxexp < jnp.finfo(products.dtype).maxexp:
        return products
    return products.astype(dtype).astype(products.dtype)


def _pairs(queries: Array, k: Array, widen: bool, along: bool) -> Array:
    """Return the product of each query with each key, [*b, K, N // K, T, S].

    `jnp.einsum` swaps its operands for that order of axes, so that rows lie across memory, and a
    softmax is three kernels for one. `along` memory, shardings spread from one mesh to another in
    forms that JAX cannot read.
    """
    if not along:
        return _contract("...tkgh,...skh->...kgts", queries, k, widen)
    return jnp.swapaxes(_contract("...tkgh,...skh->...ktgs", queries, k, widen), -3, -2)


def _contract(how: str, lhs: Array, rhs: Array, widen: bool, like: Array | None = None) -> Array:
    """Contract; where types say where arrays lie, the result lies as `like` does."""
    wide = jnp.promote_types(lhs.dtype, jnp.float32)
    if widen:
        lhs, rhs = lhs.astype(wide), rhs.astype(wide)
    place = None if like is None else _place(like)
    return jnp.einsum(how, lhs, rhs, preferred_element_type=wide, out_sharding=place)


def _place(like: Array) -> NamedSharding | None:
    sharding = jax.typeof(like).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def _grouped_bias(bias: Array, k: Array) -> Array:
    if bias.shape[-3] == 1:
        return jnp.expand_dims(bias, -3)
    return _grouped(bias, k, -3)


def _grouped(x: Array, k: Array, axis: int = -2) -> Array:
    """Return [..., K, N // K, H] of [..., N, H]: the queries that read one key head together."""
    groups = k.shape[-2]
    if x.shape[axis] == groups:
        return jnp.expand_dims(x, axis + x.ndim + 1)
    at = axis + x.ndim
    return x.reshape(*x.shape[:at], groups, x.shape[at] // groups, *x.shape[at + 1 :])


def _flat_heads(x: Array, axis: int) -> Array:
    """Merge the two axes of heads, the second of which is at `axis`."""
    at = axis + x.ndim
    if x.shape[at] == 1:
        return jnp.squeeze(x, at)
    return x.reshape(*x.shape[: at - 1], -1, *x.shape[at + 1 :])


def sum_to(x: Array, like: Array) -> Array:
    """Sum, in float32 at least, over axes along which `like` was broadcast."""
    axes = tuple(i for i, n in enumerate(like.shape) if n != x.shape[i])
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.sum(wide, axis=axes, keepdims=True).astype(like.dtype)
