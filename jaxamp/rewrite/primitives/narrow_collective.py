"""``narrow_collective`` primitive: a collective whose array is sent in a narrow format.

A sharding constraint, and a lookup in a table that is split over devices, are sent likewise: XLA
makes collectives of them.

A float32 parameter is rounded before it is sent. A cast before the collective would make the
cotangent narrow as well; but the transpose of an ``all_gather`` is a sum over devices, whose
precision is another choice.

The result may come in float32 too. Products read the narrow array and are differentiated with
respect to the wide one, so that each device's part of that sum is an unrounded accumulator. XLA
drops the widening where nothing else reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxamp.core.define import ORIGINALS
from jaxamp.core.taxonomy import OpKind, Trait, register_op_kind
from jaxamp.jaxprs.interpret import evaluate, instead_of

narrow_collective_p = Primitive("narrow_collective")
register_op_kind(narrow_collective_p, OpKind.BOUNDARY, trait=Trait.OPAQUE)


class Sending(NamedTuple):
    """A collective, and how its array is sent.

    Attributes:
      collective: a primitive that moves one array between devices, linear in it.
      params: parameters of the collective.
      send_dtype: dtype in which the array is sent.
      cotangent_dtype: dtype in which the cotangent is sent, and summed where the transpose sums.
      widened: whether the result is returned in the dtype of the array too.
    """

    collective: Primitive
    params: tuple[tuple[str, Any], ...]
    send_dtype: Any
    cotangent_dtype: Any
    widened: bool

    def bind(self, *operands: Any) -> Any:
        """Emit the collective itself."""
        return self.collective.bind(*operands, **dict(self.params))


def send_narrow(operands: Sequence[Any], how: Sending) -> list[Any]:
    """Send an array in one dtype, and its cotangent in another.

    Args:
      operands: the array, and what says which part of it goes where, as indices do.
      how: the collective, and the dtypes.

    Returns:
      The result of the collective in ``how.send_dtype``; before it, if ``how.widened``, the same in
      the dtype of the array.
    """
    return narrow_collective_p.bind(*operands, how=how)


def _collective_of(avals: Sequence[Any], params: dict[str, Any]) -> Any:
    """Return the collective that such an equation stands for."""
    return params["how"].collective, avals, dict(params["how"].params)


def _type(aval: Any, *others: Any, how: Sending) -> Any:
    sent_as = aval.update(dtype=how.send_dtype, weak_type=False)
    arrived, effects = how.collective.abstract_eval(sent_as, *others, **dict(how.params))
    wide = [arrived.update(dtype=aval.dtype)] if how.widened else []
    return [*wide, arrived], effects


def _send(operand: Any, *others: Any, how: Sending) -> list[Any]:
    arrived = how.bind(_cast(operand, how.send_dtype), *others)
    wide = [_cast(arrived, operand.dtype)] if how.widened else []
    return [*wide, arrived]


def _cast(x: Any, dtype: Any) -> Any:
    """Cast an array under the mesh of its own type: a reshard leads from one mesh to another."""
    mesh = jax.typeof(x).sharding.mesh
    with nullcontext() if mesh.empty else jax.sharding.use_abstract_mesh(mesh):
        return lax.convert_element_type(x, dtype)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """Send the tangent of the array as the array; what says where it goes has none."""
    arrived = narrow_collective_p.bind(*primals, **params)
    if isinstance(tangents[0], ad.Zero):
        return arrived, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in arrived]
    return arrived, narrow_collective_p.bind(tangents[0], *primals[1:], **params)


def _transpose(cotangents: Sequence[Any], operand: Any, *others: Any, how: Sending) -> list[Any]:
    given = [ct for ct in cotangents if not isinstance(ct, ad.Zero)]
    if not given:
        return [ad.Zero(operand.aval), *(None for _ in others)]
    total = sum((ct.astype(operand.aval.dtype) for ct in given[1:]), given[0])
    narrow, aval = _cast(total, how.cotangent_dtype), operand.aval.update(dtype=how.cotangent_dtype)
    rule = ad.primitive_transposes.get(how.collective)
    if rule is None:  # a reshard has another kind of rule, and since JAX 0.12 a gather
        returned = jax.linear_transpose(lambda x: how.bind(x, *others), aval)(narrow)
    else:
        returned = rule(narrow, ad.UndefinedPrimal(aval), *others, **dict(how.params))
    return [_cast(returned[0], operand.aval.dtype), *(None for _ in others)]


def _batch(
    axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, how: Sending
) -> tuple[list[Any], list[Any]]:
    """Batch the collective by JAX's own rule, with the primitive put back."""
    operand, out_dims = operands[0], []

    def batched(*operands: Any) -> Any:
        rule = batching.fancy_primitive_batchers[how.collective]
        result, dim = rule(axis, operands, dims, **dict(how.params))
        out_dims.append(dim)
        return result

    def instead(values: Sequence[Any], params: dict[str, Any]) -> Any:
        return send_narrow(values, how._replace(params=tuple(params.items())))[0]

    closed = jax.make_jaxpr(batched)(*operands)
    (result,) = evaluate(closed, operands, instead_of(how.collective, instead))
    # Over the axis of the vmap itself nothing is sent.
    dtypes = [operand.dtype, how.send_dtype] if how.widened else [how.send_dtype]
    return [_cast(result, d) for d in dtypes], out_dims * len(dtypes)


narrow_collective_p.multiple_results = True
narrow_collective_p.def_impl(_send)
narrow_collective_p.def_effectful_abstract_eval(_type)
ad.primitive_jvps[narrow_collective_p] = _jvp
ad.primitive_transposes[narrow_collective_p] = _transpose
batching.fancy_primitive_batchers[narrow_collective_p] = _batch
mlir.register_lowering(narrow_collective_p, mlir.lower_fun(_send, multiple_results=True))
ORIGINALS[narrow_collective_p] = _collective_of
