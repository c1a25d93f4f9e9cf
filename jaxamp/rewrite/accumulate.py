"""A contraction of narrow operands that gives its f32 accumulator, as a primitive of its own.

``preferred_element_type`` alone will not do. Its transpose multiplies an f32 cotangent with a
narrow operand, which no matrix unit does; here the cotangent is rounded to the narrow format first,
at every order of differentiation. And XLA's CPU backend lacks some bf16 x bf16 -> f32 kernels:
there the operands are widened first, which gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxamp import _compat
from jaxamp.taxonomy import OpKind, Trait, register_op_kind

F32 = np.dtype(np.float32)
Params = tuple[tuple[str, Any], ...]

accumulate_p = Primitive("accumulate")
register_op_kind(accumulate_p, OpKind.BOUNDARY, trait=Trait.OPAQUE)


def accumulate(contraction: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Contracts narrow operands to the f32 accumulator.

    Args:
      contraction: a dot or convolution primitive.
      operands: its operands; the first two of one narrow dtype.
      params: its parameters, but for ``preferred_element_type``.

    Returns:
      The float32 result, whose cotangents are rounded to the dtype of the operands.
    """
    others = {k: v for k, v in params.items() if k != "preferred_element_type"}
    return accumulate_p.bind(*operands, contraction=contraction, params=tuple(others.items()))


def original(params: dict[str, Any]) -> tuple[Primitive, dict[str, Any]]:
    """The contraction that an ``accumulate`` equation stands for, and its parameters."""
    return params["contraction"], {**dict(params["params"]), "preferred_element_type": F32}


def _contract(contraction: Primitive, params: Params, dtype: Any, *operands: Any) -> Any:
    return contraction.bind(*operands, **dict(params), preferred_element_type=dtype)


def _type(*avals: Any, contraction: Primitive, params: Params) -> Any:
    return contraction.abstract_eval(*avals, **dict(params), preferred_element_type=F32)[0]


def _direct(*operands: Any, contraction: Primitive, params: Params) -> Any:
    return _contract(contraction, params, F32, *operands)


def _widened(lhs: Any, rhs: Any, *others: Any, contraction: Primitive, params: Params) -> Any:
    lhs, rhs = lax.convert_element_type(lhs, F32), lax.convert_element_type(rhs, F32)
    return _contract(contraction, params, F32, lhs, rhs, *others)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """Bilinear: a term for each of the two operands that has a tangent."""
    out = accumulate_p.bind(*primals, **params)
    tangent: Any = None
    for index in range(2):
        if not isinstance(tangents[index], ad.Zero):
            operands = list(primals)
            operands[index] = tangents[index]
            term = accumulate_p.bind(*operands, **params)
            tangent = term if tangent is None else lax.add(tangent, term)
    return out, _compat.symbolic_zero_like(out) if tangent is None else tangent


def _transpose(
    cotangent: Any, lhs: Any, rhs: Any, *others: Any, contraction: Primitive, params: Params
) -> Any:
    known = rhs if ad.is_undefined_primal(lhs) else lhs
    narrow = known.dtype
    rounded = lax.convert_element_type(cotangent, narrow)
    rule = ad.primitive_transposes[contraction]
    return rule(rounded, lhs, rhs, *others, **dict(params), preferred_element_type=narrow)


def _batch(
    operands: Sequence[Any], axes: Sequence[Any], *, contraction: Primitive, params: Params
) -> tuple[Any, int]:
    """What JAX makes of the contraction under vmap, with the primitive put back."""

    def narrow(*xs: Any) -> Any:
        return _contract(contraction, params, F32, *xs)

    closed = jax.make_jaxpr(jax.vmap(narrow, in_axes=tuple(axes)))(*operands)
    env: dict[Any, Any] = dict(zip(closed.jaxpr.invars, operands, strict=True))
    env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for eqn in closed.jaxpr.eqns:
        values = [_compat.read_atom(env, atom) for atom in eqn.invars]
        if eqn.primitive is contraction:
            results = [accumulate(contraction, values, dict(eqn.params))]
        else:
            results = _compat.bind(eqn, values)
        env.update(zip(eqn.outvars, results, strict=True))
    return _compat.read_atom(env, closed.jaxpr.outvars[0]), 0


accumulate_p.def_impl(_widened)
accumulate_p.def_abstract_eval(_type)
ad.primitive_jvps[accumulate_p] = _jvp
ad.primitive_transposes[accumulate_p] = _transpose
batching.primitive_batchers[accumulate_p] = _batch
mlir.register_lowering(accumulate_p, mlir.lower_fun(_direct, multiple_results=False))
mlir.register_lowering(
    accumulate_p, mlir.lower_fun(_widened, multiple_results=False), platform="cpu"
)
