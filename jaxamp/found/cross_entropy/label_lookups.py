"""Look a label up in the logits, before what is computed of them for all words.

An element of `log_softmax(x)` is `x[label]` less a maximum and a logarithm. Looked up in the
logarithms, these are computed for all words, and on GPUs stored in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import OpKind, lookup
from jaxamp.found.cross_entropy.passes import Key, Step
from jaxamp.xla.primitives.label_gather import gathers_one_of_each_row

_MOVES = frozenset({"convert_element_type", "stop_gradient", "copy"})
_NOT_OF_NAN = frozenset({"pow", "integer_pow"})  # the power of nothing is one of NaN too


def looked_up(
    gather: JaxprEqn,
    key: Any,
    indices: Any,
    makers: Mapping[Key, Step],
    values: Mapping[Key, Any],
    **changes: Any,
) -> Any:
    """Return elements of a value, made of those of the values that it is computed of.

    Args:
      gather: the lookup.
      key: the value.
      indices: where its elements are.
      makers: the equations of a chunk, by what they make.
      values: what a chunk has computed.
      **changes: of the lookup's parameters.
    """
    table, params, step = values[key], gather.params | changes, makers.get(key)
    fill = params["fill_value"]
    is_of_rows = gathers_one_of_each_row(table, indices, params)
    if step is not None and is_of_rows and (fill is None or np.isnan(fill)):
        (axis,) = params["dimension_numbers"].start_index_map
        found = {o: values[o] for o in step.operands if not isinstance(o, Literal)}
        alike = (*table.shape[:axis], 1, *table.shape[axis + 1 :])  # it repeats itself for words

        def element(of: Any) -> Any:
            if isinstance(of, Literal):
                return jax_compat.literal_value(of)
            if not found[of].ndim:
                return found[of]
            if found[of].shape == alike:
                return lax.reshape(found[of], indices.shape[:-1])
            return looked_up(gather, of, indices, makers, values, **changes)

        if _is_elementwise(step) and all(
            jnp.issubdtype(x.dtype, jnp.floating) and x.shape in ((), alike, table.shape)
            for x in found.values()
        ):
            with jax_compat.emitting(step.unit.eqn):
                return jax_compat.bind(step.unit.eqn, [*map(element, step.operands)])[0]
    with jax_compat.emitting(gather):
        return jax_compat.bind(gather, [table, indices], **changes)[0]


def _is_elementwise(step: Step) -> bool:
    """Return whether elements are computed of those in their places, and are NaN if one is."""
    op, name = lookup(step.unit.eqn.primitive), step.unit.eqn.primitive.name
    if name in _NOT_OF_NAN:
        return False
    return name in _MOVES or (op is not None and op.kind is OpKind.ELEMENTWISE)
