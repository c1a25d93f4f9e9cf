"""Attention and its gradients in float64, written out in numpy without any derivative of JAX's."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxamp.found.attention.kernels.spec import AttentionSpec


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    *,
    spec: AttentionSpec,
    bias: Any = None,
    mask: np.ndarray | None = None,
) -> tuple[np.ndarray, ...]:
    """The output, and the cotangents of q, k, v and of what is added to the scores.

    Args:
        q: [*b, T, N, H]; with k and v [*b, S, K, H], as `jaxamp.found.attention.kernels` has them.
        k: keys.
        v: values.
        dout: cotangent of the output.
        spec: the scale, and which keys a query sees.
        bias: added to the scores [*b, N, T, S].
        mask: which keys are seen, broadcast to the scores.
    """
    group = q.shape[-2] // k.shape[-2]
    keys, values = (np.repeat(x, group, axis=-2) for x in (k, v))
    scores = np.einsum("...tnh,...snh->...nts", q, keys, optimize=True) * spec.scale
    if bias is not None:
        scores = scores + np.asarray(bias, np.float64)
    for seen in (spec.seen(*scores.shape[-2:]), mask):
        scores = scores if seen is None else np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = np.einsum("...nts,...snh->...tnh", p, values, optimize=True)
    dp = np.einsum("...tnh,...snh->...nts", dout, values, optimize=True)
    ds = p * (dp - np.sum(p * dp, -1, keepdims=True))
    dq = np.einsum("...nts,...snh->...tnh", ds, keys, optimize=True) * spec.scale
    dk = np.einsum("...nts,...tnh->...snh", ds, q, optimize=True) * spec.scale
    dv = np.einsum("...nts,...tnh->...snh", p, dout, optimize=True)
    return out, dq, _of_key_heads(dk, group), _of_key_heads(dv, group), ds


def _of_key_heads(x: np.ndarray, group: int) -> np.ndarray:
    return x.reshape(*x.shape[:-2], -1, group, x.shape[-1]).sum(-2)


def error(found: Any, exact: Any) -> float:
    """The relative error in the Euclidean norm."""
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
