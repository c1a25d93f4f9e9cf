"""``accumulate`` primitive: a contraction of narrow operands with f32 results and cotangents.

It differs from JAX's contractions in three ways. An operand that is the rounding of a float32
parameter may come with that parameter: the cotangent belongs to the parameter then, and is the
unrounded accumulator of the backward contraction. So cotangents are f32 before they are summed over
uses or devices.

The cotangent of a float32 result is rounded to the narrow format first, at every order of
differentiation. With ``preferred_element_type`` alone, the transpose would multiply an f32
cotangent with a narrow operand, which no matrix unit does.

It has a lowering for each backend. XLA's CPU backend lacks some dots with a float32 result: there
the operands are widened first, which gives the same numbers. GPUs have no such convolutions: there
the result is rounded, and widened after.

See: https://github.com/jax-ml/jax/issues/10818 and https://github.com/jax-ml/jax/issues/34330
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive
from jax.extend.core.primitives import conv_general_dilated_p
from jax.interpreters import ad

from jaxamp.core import jax_compat
from jaxamp.core.define import ORIGINALS, define
from jaxamp.jaxprs.interpret import evaluate, instead_of

F32 = np.dtype(np.float32)
_NONE: Mapping[int, Any] = MappingProxyType({})

accumulate_p = Primitive("accumulate")


class Contraction(NamedTuple):
    """A dot or convolution of JAX's, with narrow operands."""

    primitive: Primitive
    params: tuple[tuple[str, Any], ...]  # but for ``preferred_element_type``
    narrow: np.dtype  # in which operands and cotangents are multiplied
    dtype: np.dtype  # of the result

    def words(self) -> dict[str, Any]:
        """Return all parameters of JAX's primitive."""
        return {**dict(self.params), "preferred_element_type": self.dtype}


def accumulate(
    contraction: Primitive,
    operands: Sequence[Any],
    params: dict[str, Any],
    narrow: Any,
    dtype: Any = F32,
    originals: Mapping[int, Any] = _NONE,
) -> Any:
    """Contract operands in a narrow dtype, that in which cotangents are multiplied too.

    The first two operands are floats, narrow or rounded here; `originals` are, by index, the
    float32 arrays that they are the rounding of. What is differentiated are those arrays. The
    result is float32, or narrow for one rounding of the accumulator. Its cotangent is rounded to
    the narrow dtype; each operand's cotangent has the dtype of the array that it belongs to.
    """
    others = {k: v for k, v in params.items() if k != "preferred_element_type"}
    how = Contraction(contraction, tuple(others.items()), np.dtype(narrow), np.dtype(dtype))
    return accumulate_p.bind(*operands, *originals.values(), how=how, rounded=tuple(originals))


def contraction_of(params: dict[str, Any]) -> tuple[Primitive, dict[str, Any]]:
    """Return the contraction that an ``accumulate`` equation stands for, and its parameters."""
    return params["how"].primitive, params["how"].words()


def _original(avals: Sequence[Any], params: dict[str, Any]) -> tuple[Any, Any, Any]:
    primitive, words = contraction_of(params)
    return primitive, avals, words


def split_originals(
    values: Sequence[Any], rounded: Sequence[int]
) -> tuple[list[Any], dict[int, Any]]:
    """Split values into operands and, by index, the f32 originals that come after them.

    Values are all operands of an ``accumulate`` equation, or one for each; `rounded` has per
    original the index of the operand that is its rounding.
    """
    count = len(values) - len(rounded)
    return list(values[:count]), dict(zip(rounded, values[count:], strict=True))


def _alike(avals: Sequence[Any], narrow: np.dtype) -> list[Any]:
    """Return the types of operands, the two floats narrow."""
    floats = [aval.update(dtype=narrow, weak_type=False) for aval in avals[:2]]
    return [*floats, *avals[2:]]


@lru_cache(maxsize=1024)  # JAX asks again and again when it linearizes
def _type(*avals: Any, how: Contraction, rounded: Any) -> Any:
    operands = _alike(split_originals(avals, rounded)[0], how.narrow)
    return how.primitive.abstract_eval(*operands, **how.words())[0]


def _direct(*values: Any, how: Contraction, rounded: Any) -> Any:
    (lhs, rhs, *others), _ = split_originals(values, rounded)
    operands = [lax.convert_element_type(x, how.narrow) for x in (lhs, rhs)]
    return how.primitive.bind(*operands, *others, **how.words())


def _on_cpu(*values: Any, how: Contraction, rounded: Any) -> Any:
    (lhs, rhs, *others), _ = split_originals(values, rounded)
    if how.dtype == F32:
        lhs, rhs = (lax.convert_element_type(x, how.narrow) for x in (lhs, rhs))
        how = how._replace(narrow=F32)
    return _direct(lhs, rhs, *others, how=how, rounded=())


def _on_gpu(*values: Any, how: Contraction, rounded: Any) -> Any:
    given = how.narrow if how.primitive is conv_general_dilated_p else how.dtype
    result = _direct(*values, how=how._replace(dtype=given), rounded=rounded)
    return lax.convert_element_type(result, how.dtype)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, how: Contraction, rounded: Any
) -> tuple[Any, Any]:
    out = accumulate_p.bind(*primals, how=how, rounded=rounded)
    return out, _along(out, primals, tangents, how, rounded)


def _linearize(moving: Sequence[bool], *primals: Any, how: Contraction, rounded: Any) -> Any:
    out = accumulate_p.bind(*primals, how=how, rounded=rounded)
    direct, originals = split_originals(moving, rounded)
    moves = any(originals.get(index, direct[index]) for index in range(2))
    return out, moves, lambda *tangents: _along(out, primals, tangents, how, rounded)


def _along(
    out: Any, primals: Sequence[Any], tangents: Sequence[Any], how: Contraction, rounded: Any
) -> Any:
    """Apply bilinearity: a term for each of the two operands that has a tangent."""
    operands, _ = split_originals(primals, rounded)
    direct, originals = split_originals(tangents, rounded)
    terms = []
    for index in range(2):
        tangent = originals.get(index, direct[index])
        if not isinstance(tangent, ad.Zero):
            replaced = [tangent if i == index else x for i, x in enumerate(operands)]
            terms.append(accumulate_p.bind(*replaced, how=how, rounded=()))
    return reduce(ad.add_tangents, terms, jax_compat.symbolic_zero_like(out))


def _transpose(cotangent: Any, *values: Any, how: Contraction, rounded: Any) -> list[Any]:
    """Transpose the contraction by JAX's own rule, with the primitive put back."""
    operands, _ = split_originals(values, rounded)
    index = 0 if ad.is_undefined_primal(operands[0]) else 1
    aval = operands[index].aval
    known = [x for i, x in enumerate(operands) if i != index]
    known = [lax.convert_element_type(cotangent, how.narrow), *known]
    types = tuple(jax.typeof(x).update(weak_type=False) for x in known)
    closed = _transposed(index, aval, types, how._replace(dtype=how.narrow))

    def instead(operands: Sequence[Any], others: dict[str, Any]) -> Any:
        return accumulate(how.primitive, operands, others, how.narrow, aval.dtype)

    (back,) = evaluate(closed, known, instead_of(how.primitive, instead))
    return [back if i == index else None for i in range(len(values))]


@lru_cache(maxsize=1024)
def _transposed(index: int, aval: Any, avals: tuple[Any, ...], narrow: Contraction) -> ClosedJaxpr:
    """Return the transpose in one operand, as JAX has it for operands and results of one dtype."""
    (linear,) = _alike([aval], narrow.dtype)
    rule = ad.primitive_transposes[narrow.primitive]

    def transpose(cotangent: Any, *known: Any) -> Any:
        operands = list(known)
        operands.insert(index, ad.UndefinedPrimal(linear))
        return rule(cotangent, *operands, **narrow.words())[index]

    return jax.make_jaxpr(transpose)(*_alike(avals, narrow.dtype))


def _batch(
    values: Sequence[Any], axes: Sequence[Any], *, how: Contraction, rounded: Any
) -> tuple[Any, int]:
    """Batch the contraction by JAX's own rule, with the primitive put back.

    An original stays beside its rounding where neither is batched, and replaces it elsewhere.
    """
    operands, originals = split_originals(values, rounded)
    dims, original_dims = split_originals(axes, rounded)
    for index, value in list(originals.items()):
        if dims[index] is not None or original_dims[index] is not None:
            operands[index], dims[index] = value, original_dims[index]
            del originals[index]

    def contract(*xs: Any) -> Any:
        return how.primitive.bind(*xs, **how._replace(dtype=how.narrow).words())

    def instead(inputs: Sequence[Any], others: dict[str, Any]) -> Any:
        kept = {i: value for i, value in originals.items() if inputs[i] is operands[i]}
        assert kept.keys() == originals.keys(), "vmap has moved an operand that is not batched"
        return accumulate(how.primitive, inputs, others, how.narrow, how.dtype, kept)

    avals = _alike([jax.typeof(x) for x in operands], how.narrow)
    closed = jax.make_jaxpr(jax.vmap(contract, in_axes=tuple(dims)))(*avals)
    return evaluate(closed, operands, instead_of(how.primitive, instead))[0], 0


_LOWERED = {None: _direct, "cpu": _on_cpu, "cuda": _on_gpu, "rocm": _on_gpu}


define(accumulate_p, _on_cpu, _type, _batch, _jvp, _LOWERED)
jax_compat.linearize_by(accumulate_p, _linearize)
ad.primitive_transposes[accumulate_p] = _transpose
jax_compat.check_nans(accumulate_p, lambda params: params["how"].primitive.name)
ORIGINALS[accumulate_p] = _original
