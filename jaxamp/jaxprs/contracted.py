"""Contractions: how many numbers they multiply, and explicit precisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

EXPLICIT_PRECISION = "an explicit precision was requested"


def terms(name: str, params: dict[str, Any], ins: Sequence[Any]) -> int | None:
    """Return how many products are added up for one element, ``None`` for no contraction."""
    return _CONTRACTIONS[name](params, ins) if name in _CONTRACTIONS else None


def multiplied(name: str, params: dict[str, Any], ins: Sequence[Any], out: Any) -> int | None:
    """Return how many numbers a contraction multiplies, of JAX's or not; ``None`` for others."""
    if name in OTHERS:
        return OTHERS[name](ins)
    each = terms(name, params, ins)
    return None if each is None else size(out) * each


def multiplies_by_vector(eqn: JaxprEqn | None, *, in_batches: bool = False) -> bool:
    """Return whether a dot reads a matrix once, with a vector, or one in each of some batches."""
    if eqn is None or eqn.primitive.name != "dot_general":
        return False
    _, (batches, _) = eqn.params["dimension_numbers"]
    return (bool(batches) or not in_batches) and (is_vector(eqn, 0) or is_vector(eqn, 1))


def is_vector(eqn: JaxprEqn, place: int) -> bool:
    """Return whether an operand of a dot has no axis of its own, or none of several elements."""
    bound = {axis for axes in eqn.params["dimension_numbers"] for axis in axes[place]}
    shape = eqn.invars[place].aval.shape  # type: ignore[attr-defined]
    return all(n == 1 for axis, n in enumerate(shape) if axis not in bound)


OTHERS: dict[str, Callable[[Sequence[Any]], int]] = {}
"""By primitive that is not JAX's, how many numbers it multiplies of operands of such types."""


def has_explicit_precision(eqn: JaxprEqn) -> bool:
    """Return whether an equation names a precision above the default, or an algorithm."""
    precision = eqn.params.get("precision")
    pair = precision if isinstance(precision, tuple) else (precision,)
    return any(p is not None and p != lax.Precision.DEFAULT for p in pair)


def size(aval: Any) -> int:
    """Count the elements of a type; what is not an array has none."""
    shape = getattr(aval, "shape", None)
    return 0 if shape is None else size_of_shape(shape)


def size_of_shape(shape: Sequence[Any]) -> int:
    """Count the elements of a shape; an unknown dimension counts as one."""
    return math.prod(d if isinstance(d, int) else 1 for d in shape)


def _dot(params: dict[str, Any], ins: Sequence[Any]) -> int:
    (contracted, _), _ = params["dimension_numbers"]
    return math.prod(ins[0].shape[axis] for axis in contracted)


def _convolution(params: dict[str, Any], ins: Sequence[Any]) -> int:
    """Count the multiplications for one element of the result: a kernel less its output features.

    The zeros that the transpose of a strided convolution puts between its inputs do not count.
    """
    out_features = ins[1].shape[params["dimension_numbers"].rhs_spec[0]]
    return size(ins[1]) // max(out_features * math.prod(params["lhs_dilation"]), 1)


def _ragged_dot(params: dict[str, Any], ins: Sequence[Any]) -> int:
    """Count as for a dot; groups that split the contracted axis have a share of it each."""
    numbers = params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    groups = ins[2].shape[-1] if set(numbers.lhs_ragged_dimensions) <= set(contracted) else 1
    return math.prod(ins[0].shape[axis] for axis in contracted) // groups


_CONTRACTIONS = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot_general": _ragged_dot,
}
