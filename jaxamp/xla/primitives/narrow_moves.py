"""Move arrays in the narrow form in which they are stored, in programs for a TPU.

XLA:TPU fuses few changes of layout: a shift, a transpose or a reshape that splits an axis is a
kernel of its own. A group widens what it reads, moves it, computes, and rounds what it returns, so
that what is moved would be stored in float32. Here it is moved before it is widened, and before
arithmetic with what is broadcast along it, such as a bias or a tap of a filter. What is only moved
before it is rounded is rounded first. The results are the same, bit for bit.

A group is changed when its equation is lowered, in forward and backward passes alike.

See: ``python -m benchmarks.deviceless --target v5e --model ssd``, JAX 0.10.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision, is_narrow
from jaxamp.jaxprs.interpret import evaluate
from jaxamp.jaxprs.nested import called
from jaxamp.plan.graph.graph import is_smaller

_MOVES = {
    "broadcast_in_dim", "concatenate", "pad", "reshape", "rev", "slice", "split", "squeeze",
    "transpose",
}  # fmt: skip
_LINEAR = {"add", "mul", "rounded_cotangent", "sub"}


@dataclass(frozen=True)
class _Wide:
    """A narrow array that is widened, and computed with smaller ones, where it is read.

    Attributes:
      narrow: the array.
      steps: equations that compute with it, the place of it among their operands, and the other.
    """

    narrow: Any
    steps: tuple[tuple[JaxprEqn, int, Any], ...] = ()

    @cached_property
    def value(self) -> Any:
        x = jax_compat.convert(self.narrow, np.float32)
        for eqn, place, other in self.steps:
            (x,) = jax_compat.bind(eqn, [other, x] if place else [x, other])
        return x


def narrow_moves(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program of the same results that moves arrays while they are narrow.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> turned = jax.make_jaxpr(lambda x: x.astype("f4").T)(jnp.ones((2, 3), "bfloat16"))
    >>> [eqn.primitive.name for eqn in narrow_moves(turned).jaxpr.eqns]
    ['transpose', 'convert_element_type']
    """
    return _narrow_moves(closed)


@jax_compat.weakref_lru_cache
def _narrow_moves(closed: ClosedJaxpr) -> ClosedJaxpr:
    def flat(*args: Any) -> list[Any]:
        return evaluate(closed, args, _inlined)

    avals = [var.aval for var in closed.jaxpr.invars]
    whole = jax_compat.trace_to_jaxpr(flat, avals, closed.jaxpr.debug_info)
    if whole.consts:  # arrays that a call holds
        return closed
    jaxpr = whole.jaxpr
    rounded = _find_rounded(jaxpr)

    def early(variables: Sequence[Var], values: Sequence[Any]) -> list[Any]:
        pairs = zip(variables, values, strict=True)
        return [_rounded(x, rounded[v]) if v in rounded else x for v, x in pairs]

    def emit(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        return early(eqn.outvars, _emit(eqn, operands))

    def run(*args: Any) -> list[Any]:
        return [*map(_value, evaluate(whole, early(jaxpr.invars, args), emit))]

    return jax_compat.trace_to_jaxpr(run, avals, jaxpr.debug_info)


def _inlined(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    if eqn.primitive.name != "jit":
        return jax_compat.bind(eqn, operands)
    return evaluate(called(eqn), operands, _inlined)


def _find_rounded(jaxpr: Jaxpr) -> dict[Any, Any]:
    """Return the float32 arrays that all readers round to one format, behind moves or not."""
    wanted: dict[Any, set[Any]] = {var: {None} for var in jaxpr.outvars if isinstance(var, Var)}
    for eqn in reversed(jaxpr.eqns):
        found: set[Any] = {None}
        if eqn.primitive.name in _MOVES:
            found = {dtype for var in eqn.outvars for dtype in wanted.get(var, ())}
        elif eqn.primitive is lax.convert_element_type_p and _is_narrow(eqn.params["new_dtype"]):
            found = {eqn.params["new_dtype"]}
        for var in eqn.invars:
            if isinstance(var, Var) and getattr(var.aval, "dtype", None) == np.float32:
                wanted.setdefault(var, set()).update(found)
    alone = {var: found for var, found in wanted.items() if len(found) == 1}
    return {var: dtype for var, (dtype,) in alone.items() if dtype is not None}


def _is_narrow(dtype: Any) -> bool:
    return is_narrow(Precision.of_dtype(dtype))


def _value(x: Any) -> Any:
    return x.value if isinstance(x, _Wide) else x


def _rounded(x: Any, dtype: Any) -> _Wide:
    is_same = isinstance(x, _Wide) and not x.steps and x.narrow.dtype == dtype
    return x if is_same else _Wide(jax_compat.convert(_value(x), dtype))


def _emit(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Return the results of an equation, those that wait to be widened as such."""
    found = _moved(eqn, operands) if eqn.primitive.name in _MOVES else _computed(eqn, operands)
    if found is not None:
        return found
    if eqn.primitive is lax.convert_element_type_p:
        (x,), dtype = operands, eqn.params["new_dtype"]
        if isinstance(x, _Wide):
            if not x.steps and x.narrow.dtype == dtype:
                return [x.narrow]
        elif dtype == np.float32 and np.ndim(x) and _is_narrow(x.dtype):
            return [_Wide(x)]
    return jax_compat.bind(eqn, [*map(_value, operands)])


def _computed(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
    """Return what is computed when it is read, of one wide array and a smaller one."""
    waiting = [i for i, x in enumerate(operands) if isinstance(x, _Wide)]
    if eqn.primitive.name not in _LINEAR or len(waiting) != 1:
        return None
    (place,) = waiting
    x, other = operands[place], operands[1 - place]
    step = eqn, place, other
    is_beside = is_smaller(np.size(other), x.narrow.size)
    return [replace(x, steps=(*x.steps, step))] if is_beside else None


def _moved(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
    """Return what is moved while it is narrow."""
    array = operands[0]
    if not isinstance(array, _Wide):
        return None
    if eqn.primitive is lax.pad_p:
        if not _keeps_zeros(eqn, array):
            return None
        zero = np.zeros((), array.narrow.dtype)
        return [replace(array, narrow=lax.pad(array.narrow, zero, eqn.params["padding_config"]))]
    if eqn.primitive is lax.concatenate_p:
        parts = [x.narrow for x in operands if isinstance(x, _Wide) and not x.steps]
        is_one_kind = len(parts) == len(operands) and len({x.dtype for x in parts}) == 1
        return [_Wide(*jax_compat.bind(eqn, parts))] if is_one_kind else None
    found = [_Wide(x) for x in jax_compat.bind(eqn, [array.narrow])]
    for step, place, other in array.steps:
        beside = [other] * len(found)
        if np.ndim(other):
            shape = array.narrow.shape
            beside = jax_compat.bind(eqn, [lax.broadcast_in_dim(other, shape, range(len(shape)))])
        found = [
            replace(x, steps=(*x.steps, (step, place, y)))
            for x, y in zip(found, beside, strict=True)
        ]
    return found


def _keeps_zeros(pad: JaxprEqn, array: _Wide) -> bool:
    """Return whether zeros are put beside an array that is multiplied by the same along there."""
    fill, edges = pad.invars[1], pad.params["padding_config"]
    axes = [axis for axis, edge in enumerate(edges) if any(edge)]
    others = [np.shape(other) for eqn, _, other in array.steps if eqn.primitive is lax.mul_p]
    is_even = all(shape[axis : axis + 1] in ((), (1,)) for shape in others for axis in axes)
    is_zero = isinstance(fill, Literal) and jax_compat.literal_value(fill) == 0
    return is_zero and is_even and len(others) == len(array.steps)
