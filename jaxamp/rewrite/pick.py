"""One number of each row, as a primitive whose cotangent is compared into place.

JAX scatters the cotangents of a lookup into zeros: one kernel writes a whole array, another a
number in each row, a third reads it all. Which place a number came from can be asked of an iota
instead, in the kernel that makes the cotangents of all else that reads the row.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxamp.taxonomy import OpKind, Trait, register_op_kind

pick_p = Primitive("pick")
register_op_kind(pick_p, OpKind.BOUNDARY, trait=Trait.OPAQUE)

_MODES = (lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def is_pick(table: Any, indices: Any, params: dict[str, Any]) -> bool:
    """Whether a `gather` takes one number of each row of floats.

    Args:
      table: the array that is looked up in.
      indices: where.
      params: of the equation.
    """
    numbers, shape = params["dimension_numbers"], table.shape
    if len(numbers.start_index_map) != 1 or params["mode"] not in _MODES:
        return False
    if not all(isinstance(size, int) for size in (*shape, *indices.shape)):
        return False
    (axis,) = numbers.start_index_map
    rows, places = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    is_of_rows = rows == tuple(i for i in range(len(shape)) if i != axis)
    is_in_order = [*places] == sorted(places)
    is_one_each = indices.size == math.prod(shape[i] for i in rows)
    are_numbers = math.prod(params["slice_sizes"]) == 1 and jnp.issubdtype(
        table.dtype, jnp.floating
    )
    return is_of_rows and is_in_order and is_one_each and are_numbers


def pick(table: Any, indices: Any, params: dict[str, Any]) -> Any:
    """The numbers, as `gather` gives them."""
    return pick_p.bind(table, indices, **params)


def _gather(table: Any, indices: Any, **params: Any) -> Any:
    return lax.gather_p.bind(table, indices, **params)


def _aval(table: Any, indices: Any, **params: Any) -> Any:
    aval, _ = lax.gather_p.abstract_eval(table, indices, **params)
    return aval


def _transpose(cotangent: Any, table: Any, indices: Any, **params: Any) -> Any:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(table.aval), None]
    (axis,) = params["dimension_numbers"].start_index_map
    shape = table.aval.shape
    row = [1 if i == axis else size for i, size in enumerate(shape)]
    place = lax.reshape(indices, row).astype(jnp.int32)
    is_there = lax.broadcasted_iota(jnp.int32, shape, axis) == place
    return [jnp.where(is_there, lax.reshape(cotangent, row), 0), None]


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    return jax.vmap(partial(_gather, **params), in_axes=dims)(*args), 0


pick_p.def_impl(_gather)
pick_p.def_abstract_eval(_aval)
ad.defjvp(pick_p, lambda t, table, indices, **params: pick(t, indices, params), None)
ad.primitive_transposes[pick_p] = _transpose
batching.primitive_batchers[pick_p] = _batch
mlir.register_lowering(pick_p, mlir.lower_fun(_gather, multiple_results=False))
