"""Lowering to StableHLO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import sharding_impls as _sharding_impls
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.lib.mlir import ir as _ir  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive

from jaxamp.core.jax_compat.avals import has_typed_sharding


def lower_checkpoints(
    primitive: Primitive,
    barriers: Callable[[Any, ClosedJaxpr], Sequence[bool]],
    whole: Callable[[Any, ClosedJaxpr], ClosedJaxpr],
) -> None:
    """Choose how a primitive that `define_checkpoint` has defined is lowered.

    There is one rule for all platforms: only then may JAX lower the equation where it stands, so
    that what it holds finds what made its operands (see `before_barrier`). `barriers` says whether
    a backward pass reads each operand behind one, and `whole` changes the jaxpr for its platform.
    """

    def lower(context: Any, *args: Any, jaxpr: Jaxpr, prevent_cse: Any, **params: Any) -> Any:
        closed = _pe.close_jaxpr(jaxpr)  # one object, which caches know
        chosen: Any = tuple(barriers(context, closed))
        emitted = whole(context, closed).jaxpr
        return _ad_checkpoint._remat_lowering(
            context, *args, jaxpr=emitted, prevent_cse=chosen, **params
        )

    _mlir.register_lowering(primitive, lower, cacheable=False)


def is_partitioned(context: Any) -> bool:
    """Return whether a compiler may partition arrays, other than as ``shard_map`` says."""
    if any(map(has_typed_sharding, context.avals_in)):
        return True  # on a mesh of one device too
    axes = context.module_context.axis_context
    if isinstance(axes, _sharding_impls.SPMDAxisContext):
        return bool(set(axes.mesh.axis_names) - axes.manual_axes)
    return getattr(axes, "num_devices", 1) > 1


def is_for_gpu(context: Any) -> bool:
    """Return whether a module is lowered for GPUs alone."""
    return set(context.module_context.platforms) <= {"cuda", "rocm"}


def is_for_tpu(context: Any) -> bool:
    """Return whether a module is lowered for TPUs alone."""
    return set(context.module_context.platforms) == {"tpu"}


def before_barrier(value: Any) -> tuple[Any, np.dtype] | None:
    """Return what is behind a barrier, and perhaps widened, with its dtype; else ``None``."""
    widened = _maker(value, "stablehlo.convert", 0) or value
    saved = _maker(widened, "stablehlo.reduce_precision", 0)  # of a residual, by JAX
    rounded = _maker(saved or widened, "stablehlo.optimization_barrier", None)
    dtype = _NARROW.get(str(rounded.type.element_type)) if rounded is not None else None
    return None if dtype is None else (rounded, dtype)


def _maker(value: Any, name: str, operand: int | None) -> Any:
    """Return an operand of the operation `name` that makes `value`; ``None``: the matching one."""
    owner: Any = getattr(value, "owner", None)
    if getattr(owner, "name", None) != name:
        return None
    return owner.operands[_ir.OpResult(value).result_number if operand is None else operand]


_NARROW = {"bf16": np.dtype(jax.numpy.bfloat16), "f16": np.dtype(np.float16)}
