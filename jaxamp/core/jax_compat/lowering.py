"""Lowering to StableHLO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import pjit as _pjit
from jax._src import sharding_impls as _sharding_impls
from jax._src.interpreters import mlir as _mlir
from jax._src.lib.mlir import ir as _ir  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxamp.core.jax_compat.avals import has_typed_sharding


def lower_checkpoints(
    policy: Callable[..., Any],
    platform: str,
    choose: Callable[[Jaxpr], Sequence[bool]],
    whole: Callable[[ClosedJaxpr], ClosedJaxpr] | None = None,
) -> None:
    """Chooses how the checkpoints of a policy are lowered; others are lowered there as ever.

    Args:
      policy: of the checkpoints, by identity.
      platform: where they are lowered so.
      choose: from the jaxpr of a checkpoint, whether its backward pass reads each operand behind a
        barrier; that of others reads all behind one.
      whole: gives what is lowered instead where no array is divided among devices.
    """

    def lower(context: Any, *args: Any, jaxpr: Jaxpr, prevent_cse: Any, **params: Any) -> Any:
        if params["policy"] is policy:
            prevent_cse = tuple(choose(jaxpr))
            if whole is not None and not _is_partitioned(context):
                jaxpr = whole(ClosedJaxpr(jaxpr, ())).jaxpr
        return _ad_checkpoint._remat_lowering(
            context, *args, jaxpr=jaxpr, prevent_cse=prevent_cse, **params
        )

    _mlir.register_lowering(_ad_checkpoint.remat_p, lower, platform=platform)


def lower_calls(prefix: str, whole: Callable[[ClosedJaxpr], ClosedJaxpr]) -> None:
    """Chooses what is lowered for GPUs of ``jax.jit`` inside of another, by name.

    The rule is for all platforms, as JAX's own is: it does not part calls by platform.

    Args:
      prefix: of the names; others are lowered as ever.
      whole: gives what is lowered instead where no array is divided among devices.
    """
    as_ever = _mlir._lowerings[_pjit.jit_p].rule

    def lower(context: Any, *args: Any, jaxpr: ClosedJaxpr, name: str, **params: Any) -> Any:
        is_ours = name.startswith(prefix) and is_for_gpu(context)
        if is_ours and not _is_partitioned(context):
            jaxpr = whole(jaxpr)
        return as_ever(context, *args, jaxpr=jaxpr, name=name, **params)

    _mlir.register_lowering(_pjit.jit_p, lower, cacheable=False)


def _is_partitioned(context: Any) -> bool:
    """Whether a compiler may divide arrays among devices, other than as ``shard_map`` says."""
    if any(map(has_typed_sharding, context.avals_in)):
        return True  # on a mesh of one device too
    axes = context.module_context.axis_context
    if isinstance(axes, _sharding_impls.SPMDAxisContext):
        return bool(set(axes.mesh.axis_names) - axes.manual_axes)
    return getattr(axes, "num_devices", 1) > 1


def is_for_gpu(context: Any) -> bool:
    """Whether a module is lowered for GPUs alone."""
    return set(context.module_context.platforms) <= {"cuda", "rocm"}


def before_barrier(value: Any) -> tuple[Any, np.dtype] | None:
    """What a lowered value is a widening of, before the barrier there; ``None`` without one.

    Args:
      value: of the module that is being made.

    Returns:
      The narrow value and its dtype.
    """
    held = _maker(value, "stablehlo.convert", 0)
    named = _maker(held, "stablehlo.reduce_precision", 0)  # what JAX makes of a saved residual
    rounded = _maker(named or held, "stablehlo.optimization_barrier", None)
    dtype = _NARROW.get(str(rounded.type.element_type)) if rounded is not None else None
    return None if dtype is None else (rounded, dtype)


def _maker(value: Any, name: str, operand: int | None) -> Any:
    """An operand of the operation of a name that makes a value; ``None``: the one it hands on."""
    owner: Any = getattr(value, "owner", None)
    if getattr(owner, "name", None) != name:
        return None
    return owner.operands[_ir.OpResult(value).result_number if operand is None else operand]


_NARROW = {"bf16": np.dtype(jax.numpy.bfloat16), "f16": np.dtype(np.float16)}
