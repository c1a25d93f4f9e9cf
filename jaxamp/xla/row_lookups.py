"""Lookups of one element in each row, such as that of a label, and their transposes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

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
