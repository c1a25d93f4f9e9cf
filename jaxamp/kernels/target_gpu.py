"""The device that programs are lowered for, at hand or described."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from jaxamp.kernels.jax_compat.cudnn_calls import cudnn_version
from jaxamp.kernels.jax_compat.kernel_lowering import is_exported


@dataclass(frozen=True)
class TargetGpu:
    """Properties of a GPU by which kernels are chosen."""

    capability: tuple[int, int]  # compute capability, (9, 0) for Hopper
    cudnn: int | None  # version of cuDNN in its own numbering, 91200 for 9.12.0


# MiB of arrays that XLA keeps in VMEM, of 128 or 64, by JAX's word for a chip (JAX 0.10.2).
_ON_CHIP = {"TPU v5 lite": 112, "TPU v6 lite": 88, "TPU v5": 47, "TPU7x": 32}

_described: Any = jax.make_user_context(None)  # part of the key of jax.jit's cache


def described_gpu() -> TargetGpu | None:
    """Return the GPU that `lowering_for` describes."""
    return _described.value if isinstance(_described.value, TargetGpu) else None


def described_platform() -> str | None:
    """Return JAX's word for the platform that `lowering_for` describes, ``None`` without one."""
    return "cuda" if isinstance(_described.value, TargetGpu) else _described.value and "tpu"


@contextmanager
def lowering_for(target: TargetGpu | str | None) -> Iterator[None]:
    """Lower programs for another GPU than the one at hand, or for a TPU by JAX's word for it.

    Kernels are chosen for that device, also in exported programs: JAX does not guarantee the
    stability of their custom calls, so ``jax.export`` needs them in ``disabled_checks``.

    >>> with lowering_for(TargetGpu((9, 0), 91200)):
    ...     described_gpu()
    TargetGpu(capability=(9, 0), cudnn=91200)
    """
    with _described(target):
        yield


def gpu_at_hand() -> TargetGpu | None:
    """Return the first GPU; ``None`` without one."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return None
    major, _, minor = str(device.compute_capability).partition(".")
    return TargetGpu((int(major), int(minor or 0)), cudnn_version())


def target_platform() -> str:
    """Return JAX's word for the platform that programs are meant for, described or at hand."""
    backend = jax.default_backend()
    return described_platform() or ("cuda" if backend == "gpu" else backend)


def on_chip_memory() -> int:
    """Return how many bytes XLA keeps in the on-chip memory of the target TPU; 0 elsewhere."""
    if target_platform() != "tpu":
        return 0
    kind = _described.value or jax.devices()[0].device_kind
    return _ON_CHIP.get(kind, min(_ON_CHIP.values())) * 2**20


def target_gpu() -> TargetGpu | None:
    """Return the GPU that programs are meant for: the one described, or else the one at hand."""
    return gpu_at_hand() if described_platform() is None else described_gpu()


def gpu_of(context: Any) -> TargetGpu | None:
    """Return the GPU that a module is lowered for; ``None`` where nothing is known of it.

    An exported module is compiled elsewhere, and JAX exports no call of cuDNN unless it is told to:
    there a GPU counts if it is described.
    """
    return described_gpu() or (None if is_exported(context) else gpu_at_hand())
