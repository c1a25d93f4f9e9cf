"""A collective whose array travels in a narrow format, as a primitive of its own.

So does what XLA makes a collective of: a sharding constraint, a lookup in a table that is split.

A float32 parameter is rounded before it is sent. A cast before the collective alone will not do:
the cotangent would travel narrow as well, and what goes back over an ``all_gather`` is a sum over
devices, whose precision is another choice.

What arrives may come in float32 too. Products read the narrow array and are differentiated by the
wide one, so that each device's part of that sum is an accumulator, which nobody has rounded. XLA
drops the widening where nothing else reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxamp.core.taxonomy import OpKind, Trait, register_op_kind
from jaxamp.jaxprs.interpret import evaluate, instead_of

Params = tuple[tuple[str, Any], ...]

travel_p = Primitive("travel")
register_op_kind(travel_p, OpKind.BOUNDARY, trait=Trait.OPAQUE)


def travel(
    collective: Primitive,
    operands: Sequence[Any],
    params: dict[str, Any],
    forth: Any,
    back: Any,
    *,
    widened: bool = False,
) -> list[Any]:
    """Send an array in one dtype, and its cotangent in another.

    Args:
      collective: a primitive that moves one array between devices, linear in it.
      operands: the array, and what says which part of it goes where, as indices do.
      params: parameters of the collective.
      forth: dtype in which the array travels.
      back: dtype in which the cotangent travels, and is added up where the transpose adds.
      widened: whether what arrives is wanted in the dtype of the array too.

    Returns:
      What the collective gives, in the dtype in which it has travelled; before it, if `widened`,
      the same in the dtype of the array.
    """
    return travel_p.bind(
        *operands,
        collective=collective,
        params=tuple(params.items()),
        forth=forth,
        back=back,
        widened=widened,
    )


def sent(params: dict[str, Any]) -> tuple[Primitive, dict[str, Any]]:
    """Return the collective that a ``travel`` equation stands for, and its parameters."""
    return params["collective"], dict(params["params"])


def _type(
    aval: Any,
    *others: Any,
    collective: Primitive,
    params: Params,
    forth: Any,
    back: Any,
    widened: bool,
) -> Any:
    sent_as = aval.update(dtype=forth, weak_type=False)
    arrived, effects = collective.abstract_eval(sent_as, *others, **dict(params))
    wide = [arrived.update(dtype=aval.dtype)] if widened else []
    return [*wide, arrived], effects


def _send(
    operand: Any,
    *others: Any,
    collective: Primitive,
    params: Params,
    forth: Any,
    back: Any,
    widened: bool,
) -> list[Any]:
    arrived = collective.bind(_cast(operand, forth), *others, **dict(params))
    wide = [_cast(arrived, operand.dtype)] if widened else []
    return [*wide, arrived]


def _cast(x: Any, dtype: Any) -> Any:
    """Cast an array under the mesh of its own type: a reshard leads from one mesh to another."""
    mesh = jax.typeof(x).sharding.mesh
    with nullcontext() if mesh.empty else jax.sharding.use_abstract_mesh(mesh):
        return lax.convert_element_type(x, dtype)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """Send the tangent of the array as the array; what says where it goes has none."""
    arrived = travel_p.bind(*primals, **params)
    if isinstance(tangents[0], ad.Zero):
        return arrived, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in arrived]
    return arrived, travel_p.bind(tangents[0], *primals[1:], **params)


def _transpose(
    cotangents: Sequence[Any],
    operand: Any,
    *others: Any,
    collective: Primitive,
    params: Params,
    forth: Any,
    back: Any,
    widened: bool,
) -> list[Any]:
    given = [ct for ct in cotangents if not isinstance(ct, ad.Zero)]
    if not given:
        return [ad.Zero(operand.aval), *(None for _ in others)]
    total = sum((ct.astype(operand.aval.dtype) for ct in given[1:]), given[0])
    narrow, aval = _cast(total, back), operand.aval.update(dtype=back)
    rule = ad.primitive_transposes.get(collective)
    if rule is None:  # a reshard has another kind of rule
        placed = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding)
        returned = jax.linear_transpose(partial(collective.bind, **dict(params)), placed)(narrow)
    else:
        returned = rule(narrow, ad.UndefinedPrimal(aval), *others, **dict(params))
    return [_cast(returned[0], operand.aval.dtype), *(None for _ in others)]


def _batch(
    axis: Any,
    operands: Sequence[Any],
    dims: Sequence[Any],
    *,
    collective: Primitive,
    params: Params,
    forth: Any,
    back: Any,
    widened: bool,
) -> tuple[list[Any], list[Any]]:
    """Batch the collective by JAX's own rule, with the primitive put back."""
    operand, out_dims = operands[0], []

    def batched(*operands: Any) -> Any:
        rule = batching.fancy_primitive_batchers[collective]
        result, dim = rule(axis, operands, dims, **dict(params))
        out_dims.append(dim)
        return result

    def instead(values: Sequence[Any], params: dict[str, Any]) -> Any:
        return travel(collective, values, params, forth, back, widened=widened)[0]

    closed = jax.make_jaxpr(batched)(*operands)
    (result,) = evaluate(closed, operands, instead_of(collective, instead))
    # Over the axis of the vmap itself nothing is sent.
    dtypes = [operand.dtype, forth] if widened else [forth]
    return [_cast(result, d) for d in dtypes], out_dims * len(dtypes)


travel_p.multiple_results = True
travel_p.def_impl(_send)
travel_p.def_effectful_abstract_eval(_type)
ad.primitive_jvps[travel_p] = _jvp
ad.primitive_transposes[travel_p] = _transpose
batching.fancy_primitive_batchers[travel_p] = _batch
mlir.register_lowering(travel_p, mlir.lower_fun(_send, multiple_results=True))
