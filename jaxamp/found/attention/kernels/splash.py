"""``splash_attention``, JAX's Pallas kernel for TPU whose masks are known when it is lowered."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxamp.found.attention.kernels.fused import Fused, by_heads
from jaxamp.found.attention.kernels.known_masks import Intervals, Segments
from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands
from jaxamp.kernels.jax_compat.tpu_attention import SPLASH_WORDS, splash_backward, splash_intervals

LANES = 128
_LARGEST_BLOCK = 512
"""Queries and keys of a block, at most: what MaxText has for its TPUs. JAX's own default is 128.

See: `sa_block_q` in base.yml of https://github.com/AI-Hypercomputer/maxtext
"""
_LARGEST_HEAD = 256


def obstacle(operands: Operands, spec: AttentionSpec, backward: bool) -> str | None:
    """Return why it does not take these operands."""
    q, k, v, bias, *_ = operands
    if bias is not None:
        return "splash_attention adds no bias"
    if spec.mask is not None and max(spec.mask.shape) > SPLASH_WORDS:
        return f"splash_attention has intervals of at most {SPLASH_WORDS} words"
    if q.dtype != jnp.bfloat16:
        return f"operands are {q.dtype}, not bfloat16"
    queries, keys = q.shape[1], k.shape[1]
    if queries % LANES or keys % LANES or 0 in q.shape + k.shape:
        return f"{queries} queries and {keys} keys are not multiples of {LANES}"
    for size in (q.shape[-1], v.shape[-1]):
        if size % 8 or size > _LARGEST_HEAD:
            return f"head size {size} is not a multiple of 8 up to {_LARGEST_HEAD}"
    return None


def run(
    operands: Operands, spec: AttentionSpec, bias_grad: bool, is_exported: bool = False
) -> tuple[Any, ...]:
    """Compute output and lse, or the cotangents of q, k and v."""
    q, k, v, _, out, lse, dout = operands
    kernel, segments = _kernel(spec, q, k)
    given = [*map(by_heads, (_scaled(q, spec), k, v))]
    if dout is None:
        out, (lse,) = jax.vmap(lambda *xs: kernel(*xs, segments))(*given)
        return by_heads(out), lse if is_exported else _of_one_lane(lse)

    def one(*xs: Any) -> Any:
        return splash_backward(kernel, segments, *xs)

    dq, dk, dv = map(by_heads, jax.vmap(one)(*given, by_heads(out), lse, by_heads(dout)))
    return _scaled(dq, spec), dk, dv, None


def block(length: int) -> int:
    """Return the largest multiple of 128 that divides a length, up to a limit."""
    return max(n for n in range(LANES, _LARGEST_BLOCK + 1, LANES) if length % n == 0)


def _of_one_lane(lse: Any) -> Any:
    """Return lse, taken from the first lane before it is laid out as the backward kernels want it.

    The forward kernel writes each number 128 times, once a lane, and JAX's call slices that. The
    compiler for TPUs would lay out all lanes anew, a copy of 128 times the size of lse, if that is
    not forbidden here (libtpu of JAX 0.10.2). JAX exports no constraint of a layout.
    """
    column = with_layout_constraint(lse[..., None], Layout(tuple(range(lse.ndim + 1))))
    return lax.optimization_barrier(column[..., 0])


def _scaled(x: Any, spec: AttentionSpec) -> Any:
    """Return queries or their cotangents times the scale, for which the kernel has no place.

    Where that is no power of two, queries are rounded once more, as by hand. JAX's other kernel
    takes any scale, but moves 3.6 times the bytes of this one for heads of 128 (v5e, JAX 0.10.2).
    """
    return (x.astype(jnp.float32) * spec.scale).astype(x.dtype)


def _kernel(spec: AttentionSpec, q: Any, k: Any) -> tuple[Any, Any]:
    """Return the kernel, and numbers of segments that are mixed, which it reads beside a mask.

    Others are intervals of keys, which it computes from two numbers of a query; it passes over
    blocks that no interval has a part in.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, queries, heads, _ = q.shape
    keys = k.shape[1]
    shape = (queries, keys)
    if spec.window is not None:
        mask: Any = splash.LocalMask(shape, (spec.window - 1, 0), 0)
    else:
        mask = splash.CausalMask(shape) if spec.causal else splash.FullMask(shape)
    segments: Any = None
    if isinstance(spec.mask, Intervals):
        mask = splash_intervals(*_within(spec.mask, spec), keys)
    elif isinstance(spec.mask, Segments):
        segments = splash.SegmentIds(*map(jnp.asarray, (spec.mask.queries, spec.mask.keys)))
    rows, columns = block(queries), block(keys)
    sizes = splash.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        save_residuals=True,
        head_shards=1,
        q_seq_shards=1,
    )
    return kernel, segments


def _within(mask: Intervals, spec: AttentionSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return the first key of each query and the key after its last one, causal if that is said."""
    start, stop = mask.start, mask.stop
    if spec.causal:
        rows = np.arange(1, len(start) + 1, dtype=np.int32)
        stop = np.minimum(stop, rows)
        start = start if spec.window is None else np.maximum(start, rows - spec.window)
    return start, stop


SPLASH = Fused(name="splash_attention", obstacle=obstacle, run=run)
EXPORTED_SPLASH = replace(SPLASH, run=functools.partial(run, is_exported=True))
