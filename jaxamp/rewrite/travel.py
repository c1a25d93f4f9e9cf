"""A collective whose array travels in a narrow format, as a primitive of its own.

A float32 parameter is rounded before it is sent. A cast before the collective alone will not do:
the cotangent would travel narrow as well, and what goes back over an ``all_gather`` is a sum over
devices, whose precision is another choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxamp.rewrite.replay import replay
from jaxamp.taxonomy import OpKind, Trait, register_op_kind

Params = tuple[tuple[str, Any], ...]

travel_p = Primitive("travel")
register_op_kind(travel_p, OpKind.BOUNDARY, trait=Trait.OPAQUE)


def travel(
    collective: Primitive, operand: Any, params: dict[str, Any], forth: Any, back: Any
) -> Any:
    """Sends an array in one dtype, and its cotangent in another.

    Args:
      collective: a linear primitive that moves one array between devices.
      operand: the array.
      params: parameters of the collective.
      forth: dtype in which the array travels.
      back: dtype in which the cotangent travels, and is added up where the transpose adds.

    Returns:
      What the collective gives, in the dtype in which it has travelled.
    """
    return travel_p.bind(
        operand, collective=collective, params=tuple(params.items()), forth=forth, back=back
    )


def sent(params: dict[str, Any]) -> tuple[Primitive, dict[str, Any]]:
    """The collective that a ``travel`` equation stands for, and its parameters."""
    return params["collective"], dict(params["params"])


def _type(aval: Any, *, collective: Primitive, params: Params, forth: Any, back: Any) -> Any:
    return collective.abstract_eval(aval.update(dtype=forth, weak_type=False), **dict(params))


def _send(operand: Any, *, collective: Primitive, params: Params, forth: Any, back: Any) -> Any:
    return collective.bind(lax.convert_element_type(operand, forth), **dict(params))


def _transpose(
    cotangent: Any, operand: Any, *, collective: Primitive, params: Params, forth: Any, back: Any
) -> Any:
    rule = ad.primitive_transposes[collective]
    rounded = lax.convert_element_type(cotangent, back)
    source = ad.UndefinedPrimal(operand.aval.update(dtype=back))
    (returned,) = rule(rounded, source, **dict(params))
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
) -> tuple[Any, Any]:
    """What JAX makes of the collective under vmap, with the primitive put back."""
    (operand,) = operands
    out_dims: list[Any] = []

    def batched(x: Any) -> Any:
        rule = batching.fancy_primitive_batchers[collective]
        result, dim = rule(axis, (x,), dims, **dict(params))
        out_dims.append(dim)
        return result

    def instead(values: Sequence[Any], params: dict[str, Any]) -> Any:
        return travel(collective, values[0], params, forth, back)

    (result,) = replay(jax.make_jaxpr(batched)(operand), operands, collective, instead)
    # Over the axis of the vmap itself nothing is sent.
    return lax.convert_element_type(result, forth), out_dims[0]


travel_p.def_impl(_send)
travel_p.def_effectful_abstract_eval(_type)
ad.deflinear2(travel_p, _transpose)
batching.fancy_primitive_batchers[travel_p] = _batch
mlir.register_lowering(travel_p, mlir.lower_fun(_send, multiple_results=False))
