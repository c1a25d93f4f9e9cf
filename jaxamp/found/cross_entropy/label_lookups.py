"""Look a label up in the logits, before what is computed of them for all words.

An element of `log_softmax(x)` is `x[label]` less a maximum and a logarithm. Looked up in the
logarithms, these are computed for all words, and on GPUs stored in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import OpKind, lookup
from jaxamp.found.cross_entropy.passes import Step
from jaxamp.jaxprs.row_lookups import gathers_one_of_each_row

_MOVES = frozenset({"convert_element_type", "stop_gradient", "copy"})


def looked_up(
    gather: JaxprEqn, key: Any, indices: Any, makers: Mapping[Any, Step], values: Mapping[Any, Any]
) -> Any:
    """Return elements of a value, made of those of the values that it is computed of.

    What is no place of a row is looked up nowhere, so that nothing has a cotangent there.

    Args:
      gather: the lookup, of one element of each row.
      key: the value.
      indices: where its elements are.
      makers: the equations of a chunk, by what they make.
      values: what a chunk has computed.
    """
    (axis,) = gather.params["dimension_numbers"].start_index_map
    table, place = values[key], indices[..., 0]
    inside = jnp.clip(indices, 0, table.shape[axis] - 1)
    found = _element(gather, axis, key, inside, makers, values)
    if gather.params["mode"] is not lax.GatherScatterMode.FILL_OR_DROP:
        return found
    fill = gather.params["fill_value"]
    is_there = (place >= 0) & (place < table.shape[axis])
    return jnp.where(is_there, found, jnp.asarray(jnp.nan if fill is None else fill, found.dtype))


def _element(
    gather: JaxprEqn,
    axis: int,
    key: Any,
    indices: Any,
    makers: Mapping[Any, Step],
    values: Mapping[Any, Any],
) -> Any:
    table, step = values[key], makers.get(key)
    if step is not None and is_elementwise(step, axis, table, values):
        operands: list[Any] = []
        for of in step.operands:
            if isinstance(of, Literal):
                operands.append(jax_compat.literal_value(of))
            elif not values[of].ndim:
                operands.append(values[of])
            elif values[of].shape == table.shape:
                operands.append(_element(gather, axis, of, indices, makers, values))
            else:
                operands.append(lax.reshape(values[of], indices.shape[:-1]))
        with jax_compat.emitting(step.unit.eqn):
            return jax_compat.bind(step.unit.eqn, operands)[0]
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    with jax_compat.emitting(gather):
        return jax_compat.bind(gather, [table, indices], mode=mode, fill_value=None)[0]


def is_elementwise(step: Step, axis: int, table: Any, values: Mapping[Any, Any]) -> bool:
    """Return whether each element of a table is computed of those in its place.

    Args:
      step: what computes it.
      axis: of words; operands may be the same for all of them.
      table: the result.
      values: what a chunk has computed.
    """
    op, name = lookup(step.unit.eqn.primitive), step.unit.eqn.primitive.name
    if name not in _MOVES and (op is None or op.kind is not OpKind.ELEMENTWISE):
        return False
    alike = (*table.shape[:axis], 1, *table.shape[axis + 1 :])
    shapes = [values[o].shape for o in step.operands if not isinstance(o, Literal)]
    return table.shape in shapes and all(s in ((), alike, table.shape) for s in shapes)


def may_be_looked_up(
    gather: JaxprEqn, key: Any, indices: Any, makers: Mapping[Any, Step], values: Mapping[Any, Any]
) -> bool:
    """Return whether elements are those of a value that is computed of others, place by place."""
    table, step = values[key], makers.get(key)
    if step is None or not gathers_one_of_each_row(table, indices, gather.params):
        return False
    (axis,) = gather.params["dimension_numbers"].start_index_map
    return is_elementwise(step, axis, table, values)
