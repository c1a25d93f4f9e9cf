"""A collective whose array travels in a narrow format, as a primitive of its own.

A float32 parameter is rounded before it is sent. A cast before the collective alone will not do:
the cotangent would travel narrow as well, and what goes back over an ``all_gather`` is a sum over
devices, whose precision is another choice.

What arrives may come in float32 too. Products read the narrow array and are differentiated by the
wide one, so that each device's part of that sum is an accumulator, which nobody has rounded. XLA
drops the widening where nothing else reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    operand: Any,
    params: dict[str, Any],
    forth: Any,
    back: Any,
    *,
    widened: bool = False,
) -> list[Any]:
    """Send an array in one dtype, and its cotangent in another.

    Args:
      collective: a linear primitive that moves one array between devices.
      operand: the array.
      params: parameters of the collective.
      forth: dtype in which the array travels.
      back: dtype in which the cotangent travels, and is added up where the transpose adds.
      widened: whether what arrives is wanted in the dtype of `operand` too.

    Returns:
      What the collective gives, in the dtype in which it has travelled; before it, if `widened`,
      the same in the dtype of `operand`.
    """
    return travel_p.bind(
        operand,
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
    aval: Any, *, collective: Primitive, params: Params, forth: Any, back: Any, widened: bool
) -> Any:
    sent_as = aval.update(dtype=forth, weak_type=False)
    arrived, effects = collective.abstract_eval(sent_as, **dict(params))
    wide = [arrived.update(dtype=aval.dtype)] if widened else []
    return [*wide, arrived], effects


def _send(
    operand: Any, *, collective: Primitive, params: Params, forth: Any, back: Any, widened: bool
) -> list[Any]:
    arrived = collective.bind(lax.convert_element_type(operand, forth), **dict(params))
    wide = [lax.convert_element_type(arrived, operand.dtype)] if widened else []
    return [*wide, arrived]


def _transpose(
    cotangents: Sequence[Any],
    operand: Any,
    *,
    collective: Primitive,
    params: Params,
    forth: Any,
    back: Any,
    widened: bool,
) -> list[Any]:
    rule = ad.primitive_transposes[collective]
    given = [ct for ct in cotangents if not isinstance(ct, ad.Zero)]
    total = sum((ct.astype(operand.aval.dtype) for ct in given[1:]), given[0])
    source = ad.UndefinedPrimal(operand.aval.update(dtype=back))
    (returned,) = rule(lax.convert_element_type(total, back), source, **dict(params))
    return [lax.convert_element_type(returned, operand.aval.dtype)]


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
    (operand,) = operands
    out_dims: list[Any] = []

    def batched(x: Any) -> Any:
        rule = batching.fancy_primitive_batchers[collective]
        result, dim = rule(axis, (x,), dims, **dict(params))
        out_dims.append(dim)
        return result

    def instead(values: Sequence[Any], params: dict[str, Any]) -> Any:
        return travel(collective, values[0], params, forth, back, widened=widened)[0]

    closed = jax.make_jaxpr(batched)(operand)
    (result,) = evaluate(closed, operands, instead_of(collective, instead))
    # Over the axis of the vmap itself nothing is sent.
    dtypes = [operand.dtype, forth] if widened else [forth]
    return [lax.convert_element_type(result, d) for d in dtypes], out_dims * len(dtypes)


travel_p.multiple_results = True
travel_p.def_impl(_send)
travel_p.def_effectful_abstract_eval(_type)
ad.deflinear2(travel_p, _transpose)
batching.fancy_primitive_batchers[travel_p] = _batch
mlir.register_lowering(travel_p, mlir.lower_fun(_send, multiple_results=True))
