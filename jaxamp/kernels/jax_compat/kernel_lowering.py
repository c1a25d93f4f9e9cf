"""Lowering of kernels, on one device or divided between several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as _core
from jax._src import sharding_impls as _sharding_impls
from jax._src.interpreters import mlir as _mlir
from jax._src.lib.mlir.dialects import sdy as _sdy  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, PartitionSpec, use_abstract_mesh


def divides_by_rule(context: Any) -> bool:
    """Return whether a compiler that partitions arrays can be told how, by `custom_partitioning`.

    It asks for the rule while it compiles, here.
    """
    axes = context.module_context.axis_context
    return not is_exported(context) and isinstance(axes, _sharding_impls.ShardingContext)


def has_several_devices(context: Any) -> bool:
    """Return whether a module is lowered for more than one device, by which arrays are divided."""
    return getattr(context.module_context.axis_context, "num_devices", 1) > 1


def is_exported(context: Any) -> bool:
    """Return whether a module is lowered for ``jax.export``, to be compiled elsewhere."""
    return context.module_context.lowering_parameters.for_export


def undivided_but(context: Any, value: Any, free: Sequence[bool]) -> Any:
    """Return a value of a module of which devices have parts along its free axes alone.

    It names no mesh: which the arrays lie on, JAX tells a rule only where all lie on one.
    """
    if not has_several_devices(context) or not getattr(jax.config, "jax_use_shardy_partitioner", 1):
        return value
    axes = [_sdy.DimensionShardingAttr.get([], is_closed=not is_free) for is_free in free]
    place = _sdy.TensorShardingAttr.get(_sdy.MeshAttr.get([]), axes)
    return _sdy.ShardingConstraintOp(value, place).result


def lower_kernel(function: Callable[..., Any], context: Any, *operands: Any) -> Any:
    """Lower a function that calls a kernel: on one device, on each of a ``shard_map``, or divided.

    JAX's rule for what ``custom_partitioning`` has made asks for the devices of the program, which
    JAX tells only if all that is placed lies on one mesh ("mesh should be the same across the
    entire program"), and of an exported program not at all. It passes them on to rules that read
    tiles alone (`tiles`), so any do.
    """
    avals = [_core.ShapedArray(aval.shape, aval.dtype) for aval in context.avals_in]
    module, axes = context.module_context, context.module_context.axis_context
    if isinstance(axes, _sharding_impls.ShardingContext):
        devices = (jax.local_devices()[0],) * axes.num_devices
        some = _sharding_impls.ShardingContext(axes.num_devices, devices)
        module = module.replace(axis_context=some)
    if isinstance(axes, _sharding_impls.SPMDAxisContext):
        function = _of_one_device(function, avals)
    rule = _mlir.lower_fun(function, multiple_results=True)
    return rule(context.replace(avals_in=avals, module_context=module), *operands)


def _of_one_device(function: Callable[..., Any], avals: Sequence[Any]) -> Callable[..., Any]:
    """Return a function as it is traced where JAX does not follow along which axes values vary.

    Where it does, a ``pallas_call`` refuses results without a ``manual_axis_type``, and JAX's
    splash attention gives none (0.10.2). Types of the primitive's results, which are
    checked, declare them. In the body of a ``shard_map`` over a mesh of its own nothing is checked.

    See: https://github.com/jax-ml/jax/pull/36180
    """
    alone, everywhere = AbstractMesh((1,), ("alone",)), PartitionSpec()
    body = jax.shard_map(
        function, mesh=alone, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    with use_abstract_mesh(AbstractMesh((), ())):
        traced = jax.make_jaxpr(body)(*avals)
    (eqn,) = traced.eqns  # captured arrays are its first operands
    inner = jaxpr_as_fun(ClosedJaxpr(eqn.params["jaxpr"], ()))
    return lambda *operands: inner(*traced.consts, *operands)


def tiles(sharding: Any, rank: int) -> np.ndarray | None:
    """Return which device has each tile of an array, int[*tiles, copies]; ``None`` for no tiles."""
    found = None if sharding is None else sharding._to_xla_hlo_sharding(rank)
    if found is None or not found.is_tiled() or found.subgroup_types():
        return None
    shape = found.tile_assignment_dimensions()
    return np.asarray(found.tile_assignment_devices()).reshape(*shape[:rank], -1)
