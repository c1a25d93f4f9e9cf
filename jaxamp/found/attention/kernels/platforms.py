"""Choice of a platform's attention kernel and its way with a mask, when a primitive is lowered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxamp.core import jax_compat
from jaxamp.found.attention.kernels import cudnn
from jaxamp.found.attention.kernels.flash import FLASH
from jaxamp.found.attention.kernels.fused import Fused, flattened
from jaxamp.found.attention.kernels.known_masks import KnownMask, Piece, Segments
from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands, Results, mismatch
from jaxamp.found.attention.kernels.splash import EXPORTED_SPLASH, SPLASH
from jaxamp.kernels.jax_compat.kernel_lowering import is_exported
from jaxamp.kernels.target_gpu import TargetGpu, described_platform, gpu_of, may_call, target_gpu

_MOST_PIECES = 8
"""Calls of a kernel for one attention, at most: cuDNN makes a plan of each when it compiles."""


def ways(kernel: Fused, spec: AttentionSpec) -> Iterator[Fused]:
    """Yield a kernel as it takes a specification: in ways that cost more and more.

    Segments of one size are examples of a shorter attention, which has less scores. Others are
    copied before and after, as a TPU copies all, and a bias is read for each score.
    """
    mask = spec.mask
    if mask is None:
        yield kernel
        return
    pieces = mask.pieces if isinstance(mask, Segments) else []
    parted = [_in_pieces(kernel, pieces)] if 0 < len(pieces) <= _MOST_PIECES else []
    yield from [kernel, *parted] if kernel.skips or len(pieces) > 1 else [*parted, kernel]
    yield _with_bias_of(kernel, mask)


def _with_bias_of(kernel: Fused, mask: KnownMask) -> Fused:
    """Return a kernel that reads a known mask as a bias."""

    def types(operands: Operands) -> Operands:
        heads = (1, 1) if operands.bias is None else operands.bias.shape[:2]
        return operands._replace(bias=jax.ShapeDtypeStruct((*heads, *mask.shape), jnp.float32))

    def biased(operands: Operands) -> Operands:
        bias = 0.0 if operands.bias is None else operands.bias
        return operands._replace(bias=jnp.where(mask.seen()[None, None], bias, -jnp.inf))

    def obstacle(operands: Operands, spec: AttentionSpec, backward: bool) -> str | None:
        return kernel.obstacle(types(operands), replace(spec, mask=None), backward)

    def forward(operands: Operands, spec: AttentionSpec) -> tuple[Any, Any]:
        return kernel.forward(biased(operands), replace(spec, mask=None))

    def backward(
        operands: Operands, results: Results, spec: AttentionSpec, bias_grad: bool
    ) -> tuple[Any, ...]:
        return kernel.backward(biased(operands), results, replace(spec, mask=None), bias_grad)

    return replace(kernel, obstacle=obstacle, forward=forward, backward=backward, as_read=types)


def _in_pieces(kernel: Fused, pieces: Sequence[Piece]) -> Fused:
    """Return a kernel that attends to segments one by one, those of one size in one call."""

    def own(spec: AttentionSpec) -> Iterator[AttentionSpec]:
        for piece in pieces:
            has_window = spec.window is not None and spec.window < piece.keys
            yield replace(spec, mask=None, window=spec.window if has_window else None)

    def cut(q: Any, k: Any, v: Any) -> list[Operands]:
        arrays = (_cut(q, pieces, "queries"), _cut(k, pieces, "keys"), _cut(v, pieces, "keys"))
        return [Operands(*xs) for xs in zip(*arrays, strict=True)]

    def obstacle(operands: Operands, spec: AttentionSpec, backward: bool) -> str | None:
        if operands.bias is not None:
            return "a bias is for words of several segments"
        parts = zip(jax.eval_shape(cut, *operands[:3]), own(spec), strict=True)
        reasons = (mismatch(xs, x) or kernel.obstacle(xs, x, backward) for xs, x in parts)
        return next(filter(None, reasons), None)

    def forward(operands: Operands, spec: AttentionSpec) -> tuple[Any, Any]:
        parts = zip(cut(*operands[:3]), own(spec), strict=True)
        outs, sums = zip(*(kernel.forward(xs, x) for xs, x in parts), strict=True)
        batch = len(operands.q)
        return _joined(outs, batch), _turned(_joined(map(_turned, sums), batch))

    def backward(
        operands: Operands, results: Results, spec: AttentionSpec, bias_grad: bool
    ) -> tuple[Any, ...]:
        rows = results._replace(lse=_turned(results.lse))
        made = zip(*(_cut(x, pieces, "queries") for x in rows), strict=True)
        parts = zip(cut(*operands[:3]), made, own(spec), strict=True)
        found = [
            kernel.backward(xs, Results(out, _turned(lse), dout), x, False)[:3]
            for xs, (out, lse, dout), x in parts
        ]
        return (*(_joined(xs, len(operands.q)) for xs in zip(*found, strict=True)), None)

    return replace(kernel, obstacle=obstacle, forward=forward, backward=backward)


def _cut(x: Any, pieces: Sequence[Piece], words: str) -> list[Any]:
    """Return the segments of an array [B, words, ...], of queries or keys, as examples."""
    found, start = [], 0
    for piece in pieces:
        size = getattr(piece, words)
        stop = start + piece.repeats * size
        part = lax.slice_in_dim(x, start, stop, axis=1)
        found.append(part.reshape(-1, size, *x.shape[2:]))
        start = stop
    return found


def _joined(parts: Iterable[Any], batch: int) -> Any:
    """Return an array of so many examples from their segments."""
    return jnp.concatenate([x.reshape(batch, -1, *x.shape[2:]) for x in parts], axis=1)


def _turned(rows: Any) -> Any:
    """Return numbers of each head and word by word and head, or the other way round."""
    return jnp.swapaxes(rows, 1, 2)


PLATFORMS = ("cuda", "tpu")
"""Those that have kernels, in JAX's words."""


def chosen(
    platform: str, context: Any, operands: Operands, spec: AttentionSpec, backward: bool
) -> Fused | None:
    """Return the kernel that a platform runs; ``None`` where the composed form is lowered."""
    is_whole = not jax_compat.is_partitioned(context)
    if not (may_call(context) if platform == "cuda" else is_whole):
        return None
    flat = flattened(operands)
    for kernel in _of_gpu(gpu_of(context)) if platform == "cuda" else _of_tpu(context):
        for way in ways(kernel, spec):
            if way.obstacle(flat, spec, backward) is None:
                return way
    return None


def everywhere() -> list[Fused]:
    """Return the kernels of all platforms, on devices that take the most."""
    return [*_of_gpu(cudnn.NEWEST), SPLASH, FLASH]


def at_hand() -> list[Fused]:
    """Return the kernels of the devices at hand, or of the one that is described.

    Where there are several TPUs, XLA may partition a program over them, and kernels are none of it.
    It cannot be told how to: "Custom emitter for CustomSPMDPartitioning not found", libtpu of JAX
    0.10.2.
    """
    platform = described_platform()
    if platform is None:
        if jax.default_backend() == "tpu" and jax.device_count() > 1:
            return []
        platform = {"gpu": "cuda"}.get(backend := jax.default_backend(), backend)
    if platform == "tpu":
        return [SPLASH, FLASH]
    return _of_gpu(target_gpu()) if platform == "cuda" else []


def _of_gpu(gpu: TargetGpu | None) -> list[Fused]:
    return [] if gpu is None else [cudnn.on(gpu)]


def _of_tpu(context: Any) -> list[Fused]:
    return [EXPORTED_SPLASH if is_exported(context) else SPLASH, FLASH]
