"""Interface of a platform's fused kernel, and merging of batch axes into the one it takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxamp.kernels.attention.spec import AttentionSpec, scores_shape

Form = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Fused:
    """One fused attention. Its operands have one batch axis: q [B, T, N, H], bias [1 or B, ...].

    Attributes:
      name: in messages.
      obstacle: from q, k, v, bias and the specification, and whether it is asked for the backward
        pass: why it cannot; ``None`` if it can.
      forward: what `attention_forward` does.
      backward: what `attention_backward` does; ``bias_grad`` says whether a bias has a cotangent.
    """

    name: str
    obstacle: Callable[[Any, Any, Any, Any, AttentionSpec, bool], str | None]
    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., tuple[Any, ...]]


def forward_form(kernel: Fused, spec: AttentionSpec) -> Form:
    """Return the forward pass by a kernel as a function of the primitive's operands."""

    def run(*operands: Any) -> tuple[Any, Any]:
        q, k, v, *bias = operands
        out, lse = kernel.forward(*map(_flat, (q, k, v)), _flat_bias(bias, q), spec)
        batch = q.shape[:-3]
        return out.reshape(*batch, *out.shape[1:]), lse.reshape(*batch, *lse.shape[1:])

    return run


def backward_form(kernel: Fused, spec: AttentionSpec, bias_grad: bool) -> Form:
    """Return the backward pass by a kernel as a function of the primitive's operands."""

    def run(*operands: Any) -> tuple[Any, ...]:
        (q, k, v, *bias), (out, lse, dout) = operands[:-3], operands[-3:]
        known = [*map(_flat, (q, k, v)), _flat_bias(bias, q)]
        rows = lse.reshape(-1, *lse.shape[-2:])
        results = [_flat(out), rows, _flat(dout)]
        dq, dk, dv, dbias = kernel.backward(*known, *results, spec, bias_grad)
        found = [d.reshape(x.shape) for d, x in zip((dq, dk, dv), (q, k, v), strict=True)]
        if not bias_grad:
            return tuple(found)
        whole = dbias.reshape(*_batch_of(bias[0], q), *dbias.shape[1:])
        return (*found, _sum_to(whole, bias[0]))

    return run


def flattened(q: Any, k: Any, v: Any, bias: Any) -> tuple[Any, Any, Any, Any]:
    """Return the types of operands with one batch axis, from arrays or avals."""
    queries, keys, values = (jax.ShapeDtypeStruct(_flat_shape(x), x.dtype) for x in (q, k, v))
    if bias is None:
        return queries, keys, values, None
    shape = (math.prod(_batch_of(bias, q)), *bias.shape[-3:])
    return queries, keys, values, jax.ShapeDtypeStruct(shape, bias.dtype)


def _flat_shape(x: Any) -> tuple[int, ...]:
    return (math.prod(x.shape[:-3]), *x.shape[-3:])


def _flat(x: Any) -> Any:
    return x.reshape(_flat_shape(x))


def _batch_of(bias: Any, q: Any) -> tuple[int, ...]:
    """Return the batch axes that a kernel reads a bias with: all, or none of them."""
    batch = bias.shape[:-3]
    return batch if all(n == 1 for n in batch) else q.shape[:-3]


def _flat_bias(bias: list[Any], q: Any) -> Any:
    if not bias:
        return None
    (given,) = bias
    whole = jnp.broadcast_to(given, (*_batch_of(given, q), *given.shape[-3:]))
    return _flat(whole)


def _sum_to(x: Any, like: Any) -> Any:
    """Sum, in float32 at least, over axes along which `like` was broadcast."""
    axes = tuple(i for i, n in enumerate(like.shape) if n != x.shape[i])
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.sum(wide, axis=axes, keepdims=True).astype(like.dtype)


def with_all_keys(bias: Any, q: Any, k: Any) -> Any:
    """Return a bias with a number for each query and key: kernels broadcast over neither."""
    *_, queries, keys = scores_shape(q, k)
    return jnp.broadcast_to(bias, (*bias.shape[:2], queries, keys))
