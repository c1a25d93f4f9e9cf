"""``label_gather`` primitive: a gather whose transpose is a comparison with an iota.

JAX's transpose of a gather scatters the cotangents into zeros: XLA makes one kernel that writes the
zeros, one that writes an element in each row, and one that reads it all. Compared with an iota,
each element of the cotangent is computed in the kernel that computes the cotangents of the other
readers of the row.

See: ``python -m benchmarks.techniques --target h200 --only all label-comparisons``, JAX 0.10.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from jaxamp.core import jax_compat
from jaxamp.core.define import define

label_gather_p = Primitive("label_gather")
_MODES = (lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def gathers_one_of_each_row(table: Any, indices: Any, params: dict[str, Any]) -> bool:
    """Return whether a `gather` takes one element of each row of floats."""
    numbers = params["dimension_numbers"]
    rows = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    if not jnp.issubdtype(table.dtype, jnp.floating) or params["mode"] not in _MODES:
        return False
    is_of_numbers = set(params["slice_sizes"]) == {1}
    return is_of_numbers and _is_one_each(table, indices, numbers.start_index_map, rows)


def scatters_one_to_each_row(zeros: Any, indices: Any, params: dict[str, Any]) -> bool:
    """Return whether a `scatter-add` to zeros puts one element in each row: the transpose."""
    numbers = params["dimension_numbers"]
    rows = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    axes = numbers.scatter_dims_to_operand_dims
    is_of_numbers = not numbers.update_window_dims and params["mode"] in _MODES
    return is_of_numbers and _is_one_each(zeros, indices, axes, rows)


def _is_one_each(
    table: Any, indices: Any, axes: Sequence[int], rows: tuple[Sequence[int], Sequence[int]]
) -> bool:
    """Return whether indices select along one axis, one per row, in the order of the rows."""
    shape, (of_table, of_indices) = table.shape, rows
    if len(axes) != 1 or not all(isinstance(size, int) for size in (*shape, *indices.shape)):
        return False
    is_of_rows = [*of_table] == [i for i in range(len(shape)) if i != axes[0]]
    is_in_order = [*of_indices] == sorted(of_indices)
    return is_of_rows and is_in_order and indices.size == math.prod(shape[i] for i in of_table)


def label_gather(table: Any, indices: Any, params: dict[str, Any]) -> Any:
    """Gather one element of each row."""
    return label_gather_p.bind(table, indices, **params)


def scatter_by_comparison(numbers: Any, indices: Any, shape: Sequence[int], axis: int) -> Any:
    """Return zeros with one other element in each row; where its index is out of bounds, none."""
    place, is_there = _places(indices, shape, axis)
    return jnp.where(is_there, lax.reshape(numbers, place.shape), 0)


def gather_by_sum(table: Any, indices: Any, **params: Any) -> Any:
    """Gather by masked sums of rows, which XLA:TPU fuses; it fuses no gather."""
    (axis,) = params["dimension_numbers"].start_index_map
    place, is_there = _places(indices, table.shape, axis)
    found = jnp.sum(jnp.where(is_there, table, 0), axis, keepdims=True)
    if params["mode"] is lax.GatherScatterMode.FILL_OR_DROP:
        fill = jnp.nan if params["fill_value"] is None else params["fill_value"]
        found = jnp.where((place >= 0) & (place < table.shape[axis]), found, fill)
    return lax.reshape(found, _aval(jax.typeof(table), jax.typeof(indices), **params).shape)


def _places(indices: Any, shape: Sequence[int], axis: int) -> tuple[jax.Array, jax.Array]:
    """Return the index in each row, and a mask that is true there."""
    row = [1 if i == axis else size for i, size in enumerate(shape)]
    place = lax.reshape(indices, row).astype(jnp.int32)
    return place, lax.broadcasted_iota(jnp.int32, shape, axis) == place


def _aval(table: Any, indices: Any, **params: Any) -> Any:
    return lax.gather_p.abstract_eval(table, indices, **params)[0]


def _transpose(cotangent: Any, table: Any, indices: Any, **params: Any) -> Any:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(table.aval), None]
    (axis,) = params["dimension_numbers"].start_index_map
    return [scatter_by_comparison(cotangent, indices, table.aval.shape, axis), None]


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    return jax.vmap(partial(lax.gather_p.bind, **params), in_axes=dims)(*args), 0


_LOWERED = {None: lax.gather_p.bind, "tpu": gather_by_sum}
define(label_gather_p, lax.gather_p.bind, _aval, _batch, lowered=_LOWERED)
ad.defjvp(
    label_gather_p, lambda t, table, indices, **params: label_gather(t, indices, params), None
)
ad.primitive_transposes[label_gather_p] = _transpose
jax_compat.check_like(label_gather_p, lax.gather_p)
