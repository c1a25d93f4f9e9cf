"""``narrow_collective`` primitive: a collective whose array is sent in a narrow format.

A sharding constraint, and a lookup in a table that is split over devices, are sent likewise: XLA
makes collectives of them. So is one of rows that are read often: XLA would store them in float32.

A float32 parameter is rounded before it is sent. A cast before the collective would make the
cotangent narrow as well; but the transpose of an ``all_gather`` is a sum over devices, whose
precision is another choice.

The result may come in float32 too. Products read the narrow array and are differentiated with
respect to the wide one, so that each device's part of that sum is an unrounded accumulator. XLA
drops the widening where nothing else reads it.

On a CPU what is added up, or compared, in bfloat16 is sent in float32. XLA does so itself, but for
the sums of a ``shard_map`` over some axes of a mesh, where its compiler ends the process
(docs/lab-notebook.md, JAX 0.10.2): they are equations of this primitive for the sake of their
lowering.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from jaxamp.core import jax_compat
from jaxamp.core.define import ORIGINALS
from jaxamp.core.taxonomy import OpKind, Trait, lookup, register_op_kind
from jaxamp.jaxprs.interpret import evaluate, instead_of

narrow_collective_p = Primitive("narrow_collective")
register_op_kind(narrow_collective_p, OpKind.BOUNDARY, trait=Trait.OPAQUE)


class Sending(NamedTuple):
    """A collective, and how its array is sent."""

    collective: Primitive  # moves one array between devices, linear in it
    params: tuple[tuple[str, Any], ...]
    send_dtype: Any
    cotangent_dtype: Any  # in which the cotangent is sent, and summed where the transpose sums
    widened: bool  # whether the result is returned in the dtype of the array too

    def bind(self, *operands: Any) -> Any:
        """Emit the collective itself."""
        return self.collective.bind(*operands, **dict(self.params))


def send_narrow(operands: Sequence[Any], how: Sending) -> list[Any]:
    """Send an array in one dtype, and its cotangent in another.

    After the array, operands say which part of it goes where, as indices do. The result is that of
    the collective in ``how.send_dtype``; before it, if ``how.widened``, the same in the array's.
    """
    return narrow_collective_p.bind(*operands, how=how)


def send_alike(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Send arrays as they are; by this primitive where a CPU could not add them up."""
    op, dtype = lookup(eqn.primitive), getattr(operands[0], "dtype", None)
    is_sent = op is not None and (op.trait in _SENDING or eqn.primitive.name in _EXTREMA)
    if not is_sent or dtype != jnp.bfloat16 or not jax_compat.is_partly_manual():
        return jax_compat.bind(eqn, operands)
    how = Sending(eqn.primitive, tuple(eqn.params.items()), dtype, dtype, widened=False)
    return send_narrow(operands, how)


_EXTREMA = ("pmax", "pmin")
_SENDING = (Trait.ALLREDUCE, Trait.COLLECTIVE, Trait.VARY)  # their transposes add up, too


def _collective_of(avals: Sequence[Any], params: dict[str, Any]) -> Any:
    """Return the collective that such an equation stands for."""
    return params["how"].collective, avals, dict(params["how"].params)


def _type(aval: Any, *others: Any, how: Sending) -> Any:
    sent_as = aval.update(dtype=how.send_dtype, weak_type=False)
    arrived, effects = how.collective.abstract_eval(sent_as, *others, **dict(how.params))
    wide = [arrived.update(dtype=aval.dtype)] if how.widened else []
    return [*wide, arrived], effects


def _send(operand: Any, *others: Any, how: Sending, summed: Any = None) -> list[Any]:
    """Send; what is rounded is added up in ``summed``, if that is given."""
    sent = jax_compat.convert(operand, how.send_dtype)
    sent = sent if summed is None else jax_compat.convert(sent, summed)
    arrived = jax_compat.convert(how.bind(sent, *others), how.send_dtype)
    wide = [jax_compat.convert(arrived, operand.dtype)] if how.widened else []
    return [*wide, arrived]


def _send_on_cpu(*operands: Any, how: Sending) -> list[Any]:
    op = lookup(how.collective)
    is_sum = op is not None and op.trait in (Trait.ALLREDUCE, Trait.EXTREMUM)
    is_unsafe = is_sum and how.send_dtype == jnp.bfloat16
    return _send(*operands, how=how, summed=jnp.float32 if is_unsafe else None)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """Send the tangent of the array as the array; what says where it goes has none."""
    if (name := params["how"].collective.name) in _EXTREMA:
        raise NotImplementedError(f"Differentiation rule for '{name}' not implemented")  # as in JAX
    arrived = narrow_collective_p.bind(*primals, **params)
    if isinstance(tangents[0], ad.Zero):
        return arrived, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in arrived]
    return arrived, narrow_collective_p.bind(tangents[0], *primals[1:], **params)


def _transpose(cotangents: Sequence[Any], operand: Any, *others: Any, how: Sending) -> list[Any]:
    given = [ct for ct in cotangents if not isinstance(ct, ad.Zero)]
    if not given:
        return [ad.Zero(operand.aval), *(None for _ in others)]
    total = sum((ct.astype(operand.aval.dtype) for ct in given[1:]), given[0])
    narrow = jax_compat.convert(total, how.cotangent_dtype)
    aval = operand.aval.update(dtype=how.cotangent_dtype)

    def transposed(cotangent: Any, *others: Any) -> Any:
        return jax_compat.transpose(how.collective, cotangent, aval, others, dict(how.params))

    closed = jax.make_jaxpr(transposed)(narrow, *others)
    (returned,) = evaluate(closed, [narrow, *others], send_alike)
    return [jax_compat.convert(returned, operand.aval.dtype), *(None for _ in others)]


def _batch(
    axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, how: Sending
) -> tuple[list[Any], list[Any]]:
    """Batch the collective by JAX's own rule, with the primitive put back."""
    operand, out_dims = operands[0], []

    def batched(*operands: Any) -> Any:
        if rule := batching.fancy_primitive_batchers.get(how.collective):
            result, dim = rule(axis, operands, dims, **dict(how.params))
        else:
            plain: Any = batching.primitive_batchers
            result, dim = plain[how.collective](operands, dims, **dict(how.params))
        out_dims.append(dim)
        return result

    def instead(values: Sequence[Any], params: dict[str, Any]) -> Any:
        return send_narrow(values, how._replace(params=tuple(params.items())))[0]

    closed = jax.make_jaxpr(batched)(*operands)
    (result,) = evaluate(closed, operands, instead_of(how.collective, instead))
    # Over the axis of the vmap itself nothing is sent.
    dtypes = [operand.dtype, how.send_dtype] if how.widened else [how.send_dtype]
    return [jax_compat.convert(result, d) for d in dtypes], out_dims * len(dtypes)


narrow_collective_p.multiple_results = True
narrow_collective_p.skip_canonicalization = True  # as a reshard: its operand has another mesh
narrow_collective_p.def_impl(_send)
narrow_collective_p.def_effectful_abstract_eval(_type)
ad.primitive_jvps[narrow_collective_p] = _jvp
ad.primitive_transposes[narrow_collective_p] = _transpose
batching.fancy_primitive_batchers[narrow_collective_p] = _batch
for platform, lowered in {None: _send, "cpu": _send_on_cpu}.items():
    rule = mlir.lower_fun(lowered, multiple_results=True)
    mlir.register_lowering(narrow_collective_p, rule, platform=platform)
ORIGINALS[narrow_collective_p] = _collective_of
