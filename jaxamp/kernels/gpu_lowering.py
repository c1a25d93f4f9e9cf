"""Lowering of a primitive by a kernel of the GPU that a module is lowered for, or without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.interpreters import mlir

from jaxamp.core import jax_compat
from jaxamp.kernels.jax_compat.kernel_lowering import divides_by_rule, is_exported, lower_kernel
from jaxamp.kernels.target_gpu import TargetGpu, described_gpu, gpu_at_hand


def gpu_of(context: Any) -> TargetGpu | None:
    """Return the GPU that a module is lowered for; ``None`` where nothing is known of it.

    An exported module is compiled elsewhere, and JAX exports no call of cuDNN unless it is told to:
    there a GPU counts if it is described.
    """
    return described_gpu() or (None if is_exported(context) else gpu_at_hand())


def may_call(context: Any) -> bool:
    """Return whether a call may stand in a module for GPUs that a compiler partitions, or is whole.

    The compiler asks how to divide it, by `custom_partitioning`, unless the module is exported.
    """
    return not jax_compat.is_partitioned(context) or divides_by_rule(context)


def lower(
    kernel: Callable[..., Any] | None, composed: Callable[..., Any], context: Any, *operands: Any
) -> Any:
    """Lower what a kernel computes, or the composed form where there is no kernel."""
    if kernel is None:
        return mlir.lower_fun(composed, multiple_results=True)(context, *operands)
    return lower_kernel(kernel, context, *operands)
