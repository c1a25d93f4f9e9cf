"""JAX's own Pallas attention for GPUs, in Triton: its forward pass and its backward rule."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from jaxamp.core.jax_compat.release import JAX

_KINDS = {(8, 0): "NVIDIA A100", (9, 0): "NVIDIA H100", (10, 0): "NVIDIA B200"}
"""Names of GPUs that JAX knows, by the compute capability from which they stand for others."""


def triton_forward(
    q: Any, k: Any, v: Any, segments: Any, scale: float, causal: bool, blocks: dict[str, int]
) -> tuple[Any, Any]:
    """Return the output in the layout BTNH, and the log-sum-exp of the scores to base two.

    Words see those alone that have the same number in `segments`, int32[B, T] or ``None``.
    """
    calls = _calls()
    words: dict[str, Any] = {"sm_scale": scale, "causal": causal, "return_residuals": True}
    return calls.mha(q, k, v, segments, block_sizes=calls.BlockSizes(**blocks), **words)


def triton_backward(
    q: Any,
    k: Any,
    v: Any,
    segments: Any,
    out: Any,
    lse: Any,
    dout: Any,
    scale: float,
    causal: bool,
    blocks: dict[str, int],
) -> tuple[Any, Any, Any]:
    """Return the cotangents of q, k and v.

    The kernel multiplies the output with its cotangent in their own type, so it is given the first
    in float32.
    """
    calls = _calls()
    residuals = (q, k, v, segments, out.astype(jnp.float32), lse)
    sizes = calls.BlockSizes(**blocks)
    words = (sizes, "triton", None, 2, None, False, False, False)
    return calls._mha_backward(scale, causal, *words, residuals, dout)[:3]


@functools.cache
def _calls() -> Any:
    with _quiet():
        return importlib.import_module("jax.experimental.pallas.ops.gpu.attention")


@contextmanager
def lowering_triton(capability: tuple[int, int] | None) -> Iterator[None]:
    """Lower Pallas' kernels in Triton for a GPU at hand, or for an absent one.

    Args:
      capability: compute capability of the absent GPU; ``None`` for the one at hand.
    """
    with _quiet(), ExitStack() as stack:
        if capability and JAX >= (0, 12):  # 0.12 asks for the device
            kind = _KINDS[max(known for known in _KINDS if known <= capability)]
            device = jax.sharding.AbstractDevice(kind, None, "gpu")
            mesh: Any = jax.sharding.get_abstract_mesh()
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh.update(abstract_device=device)))
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what JAX 0.12 says to whoever imports or lowers its kernels in Triton.

    It advises to use other packages, but kernels are chosen here, not by the user.
    """
    with warnings.catch_warnings():
        for start in ("jax.experimental.pallas.ops.gpu.attention", "The Pallas Triton backend"):
            warnings.filterwarnings("ignore", start, DeprecationWarning)
        yield
