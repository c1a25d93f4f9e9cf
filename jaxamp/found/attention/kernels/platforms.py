"""Choice of a platform's attention kernel, made when the primitive is lowered for it."""

from __future__ import annotations

from typing import Any

import jax

from jaxamp.core import jax_compat
from jaxamp.found.attention.kernels import cudnn
from jaxamp.found.attention.kernels.flash import FLASH
from jaxamp.found.attention.kernels.fused import Fused, flattened
from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands
from jaxamp.found.attention.kernels.splash import EXPORTED_SPLASH, SPLASH
from jaxamp.found.attention.kernels.ways import ways
from jaxamp.kernels.gpu_lowering import gpu_of, may_call
from jaxamp.kernels.jax_compat.kernel_lowering import is_exported
from jaxamp.kernels.target_gpu import TargetGpu, described_platform, target_gpu

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
