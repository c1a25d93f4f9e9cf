"""Lowering of a primitive by a kernel of the GPU that a module is lowered for, or without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.interpreters import mlir

from jaxamp.core import jax_compat
from jaxamp.core.target_gpu import TargetGpu, described_gpu, described_platform


def gpu_of(context: Any) -> TargetGpu | None:
    """Return the GPU that a module is lowered for; ``None`` where nothing is known of it.

    An exported module is compiled elsewhere, and JAX exports no call of cuDNN unless it is told to:
    there a GPU counts if it is described.
    """
    return described_gpu() or (None if jax_compat.is_exported(context) else gpu_at_hand())


def may_call(context: Any) -> bool:
    """Return whether a call may stand in a module for GPUs that a compiler partitions, or is whole.

    The compiler asks how to divide it, by `custom_partitioning`, unless the module is exported.
    """
    return not jax_compat.is_partitioned(context) or jax_compat.divides_by_rule(context)


def target_gpu() -> TargetGpu | None:
    """Return the GPU that programs are meant for: the one described, or else the one at hand."""
    return gpu_at_hand() if described_platform() is None else described_gpu()


def gpu_at_hand() -> TargetGpu | None:
    """Return the first GPU; ``None`` without one."""
    here = jax_compat.gpu_at_hand()
    return here and TargetGpu(here.capability, here.cudnn)


def lower(
    kernel: Callable[..., Any] | None, composed: Callable[..., Any], context: Any, *operands: Any
) -> Any:
    """Lower what a kernel computes, or the composed form where there is no kernel.

    Args:
      kernel: calls it; a function of the primitive's operands to a sequence of results.
      composed: the same in JAX's own operations.
      context: of the lowering.
      *operands: values of the module.
    """
    if kernel is None:
        return mlir.lower_fun(composed, multiple_results=True)(context, *operands)
    gpu = described_gpu()
    capability = gpu.capability if gpu else None
    return jax_compat.lower_kernel(kernel, context, *operands, capability=capability)
