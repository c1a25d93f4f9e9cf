"""Move arrays in the narrow form in which they are stored, in programs for a TPU.

XLA:TPU fuses few changes of layout: a shift, a transpose or a reshape that splits an axis is a
kernel of its own. A group widens what it reads, moves it, computes, and rounds what it returns, so
that what is moved would be stored in float32. Here it is moved before it is widened, and before
what is computed of it alone, as a `silu` is, and of smaller arrays, as a bias. What is only moved
before it is rounded is rounded first. Of a sum of narrow arrays parts are taken before they are
added up, as a kernel of its own would add them. So is a number of each row, as a label's logit:
XLA stores what three sums read. The results are the same, bit for bit.

A group is changed when its equation is lowered, in forward and backward passes alike.

See: ``python -m benchmarks.deviceless --target v5e --model ssd``, JAX 0.10.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision, is_narrow
from jaxamp.core.taxonomy import Trait, is_by_element, op_of
from jaxamp.jaxprs.interpret import Find, Instead, emitted, evaluate
from jaxamp.jaxprs.nested import called
from jaxamp.plan.graph.graph import is_smaller
from jaxamp.xla.primitives.label_gather import label_gather_p
from jaxamp.xla.primitives.rounding_barrier import unbarriered_p


@dataclass(frozen=True, eq=False)
class _Wide:
    """An array of float32 that is computed where it is read, from narrow ones and others."""

    narrow: Any  # the narrow array, which is widened; the first where several are added up
    eqn: JaxprEqn | None = None  # an equation that is element by element, if one computes with it
    operands: tuple[Any, ...] = ()  # those of the equation
    is_alone: bool = True  # whether all else that it is computed from is smaller

    @cached_property
    def arrays(self) -> list[Any]:
        found = {id(y): y for x in self.operands if isinstance(x, _Wide) for y in x.arrays}
        return [*found.values()] or [self.narrow]

    @cached_property
    def value(self) -> Any:
        if self.eqn is None:
            return jax_compat.convert(self.narrow, np.float32)
        (x,) = jax_compat.bind(self.eqn, [*map(_value, self.operands)])
        return x


@jax_compat.kept_with
def narrow_moves(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program of the same results that moves arrays while they are narrow.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> turned = jax.make_jaxpr(lambda x: x.astype("f4").T)(jnp.ones((2, 3), "bfloat16"))
    >>> [eqn.primitive.name for eqn in narrow_moves(turned).jaxpr.eqns]
    ['transpose', 'convert_element_type']
    """
    whole = inlined(closed, _undone)
    jaxpr = whole.jaxpr
    rounded = _find_rounded(jaxpr)

    def early(variables: Sequence[Var], values: Sequence[Any]) -> list[Any]:
        pairs = zip(variables, values, strict=True)
        return [_rounded(x, rounded[v]) if v in rounded else x for v, x in pairs]

    def emit(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        return early(eqn.outvars, _emit(eqn, operands))

    def run(*args: Any) -> list[Any]:
        return [*map(_value, evaluate(whole, early(jaxpr.invars, args), emit))]

    return jax_compat.trace_to_jaxpr(run, whole.in_avals, jaxpr.debug_info)


def inlined(closed: ClosedJaxpr, find: Find = lambda eqn: None) -> ClosedJaxpr:
    """Return a program without calls of jitted functions; itself where one holds arrays."""

    def body(eqn: JaxprEqn) -> Instead | None:
        if eqn.primitive.name != "jit":
            return find(eqn)
        inside = emitted(called(eqn), body)
        return lambda operands: evaluate(inside, operands, jax_compat.bind)

    whole = emitted(closed, body)
    return closed if whole.consts else whole


def _undone(eqn: JaxprEqn) -> Instead | None:
    return list if eqn.primitive is unbarriered_p else None  # that is for GPUs


def _moves(eqn: JaxprEqn) -> bool:
    """Return whether an equation moves or joins numbers by its parameters, or takes one a row."""
    trait = op_of(eqn.primitive).trait
    if trait is Trait.MERGE:
        return all(v.aval.dtype == eqn.outvars[0].aval.dtype for v in eqn.invars)  # type: ignore[attr-defined]
    is_alone = trait in (Trait.SHAPE, Trait.PART) and len(eqn.invars) == 1
    return is_alone or eqn.primitive is label_gather_p


def _find_rounded(jaxpr: Jaxpr) -> dict[Any, Any]:
    """Return the float32 arrays that all readers round to one format, behind moves or not."""
    wanted: dict[Any, set[Any]] = {var: {None} for var in jaxpr.outvars if isinstance(var, Var)}
    for eqn in reversed(jaxpr.eqns):
        found: set[Any] = {None}
        if _moves(eqn):
            found = {dtype for var in eqn.outvars for dtype in wanted.get(var, ())}
        elif eqn.primitive is lax.convert_element_type_p and _is_narrow(eqn.params["new_dtype"]):
            found = {eqn.params["new_dtype"]}
        for var in eqn.invars:
            if isinstance(var, Var) and getattr(var.aval, "dtype", None) == np.float32:
                wanted.setdefault(var, set()).update(found)
    # Nothing is wanted of what is moved and then not read.
    one = {var: next(iter(dtypes)) for var, dtypes in wanted.items() if len(dtypes) == 1}
    return {var: dtype for var, dtype in one.items() if dtype}


def _is_narrow(dtype: Any) -> bool:
    return is_narrow(Precision.of_dtype(dtype))


def _value(x: Any) -> Any:
    return x.value if isinstance(x, _Wide) else x


def _rounded(x: Any, dtype: Any) -> _Wide:
    is_same = isinstance(x, _Wide) and not x.eqn and x.narrow.dtype == dtype
    return x if is_same else _Wide(jax_compat.convert(_value(x), dtype))


def _emit(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Return the results of an equation, those that wait to be widened as such."""
    found = _moved(eqn, operands) if _moves(eqn) else _computed(eqn, operands)
    if found is None and eqn.primitive is lax.convert_element_type_p:
        found = _converted(operands[0], eqn.params["new_dtype"])
    return jax_compat.bind(eqn, [*map(_value, operands)]) if found is None else found


def _converted(x: Any, dtype: Any) -> list[Any] | None:
    if isinstance(x, _Wide):
        return [x.narrow] if not x.eqn and x.narrow.dtype == dtype else None
    return [_Wide(x)] if dtype == np.float32 and np.ndim(x) and _is_narrow(x.dtype) else None


def _computed(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
    """Return what is computed when it is read, of one narrow array, or as a sum of several."""
    waiting = [x for x in operands if isinstance(x, _Wide)]
    if not is_by_element(eqn.primitive) or not waiting:
        return None
    aval: Any = eqn.outvars[0].aval
    narrow = waiting[0].narrow
    is_alone = all(
        x.is_alone if isinstance(x, _Wide) else is_smaller(np.size(x), narrow.size)
        for x in operands
    )
    array = _Wide(narrow, eqn, tuple(operands), is_alone)
    is_wide = aval.dtype == np.float32 and aval.shape == narrow.shape
    is_one, is_sum = len(array.arrays) == 1, eqn.primitive.name == "add_any" and is_alone
    # A sum is emitted where it stands, too, for those who read the whole of it.
    is_later = is_wide and (is_one or (is_sum and array.value is not None))
    return [array] if is_later else None


def _moved(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
    """Return what is moved while it is narrow."""
    array, trait = operands[0], op_of(eqn.primitive).trait
    if not isinstance(array, _Wide) or (len(array.arrays) > 1 and trait is not Trait.PART):
        return None
    if not array.is_alone and eqn.primitive is not label_gather_p:
        return None  # of a lookup little is left, whatever it takes it from
    is_broadcast, size = eqn.primitive is lax.broadcast_in_dim_p, eqn.outvars[0].aval.size  # type: ignore[attr-defined]
    if is_broadcast and array.eqn and is_smaller(array.narrow.size, size):
        return None  # what is repeated is computed once
    is_pad, shape = eqn.primitive is lax.pad_p, array.narrow.shape
    if trait is Trait.MERGE and not is_pad:
        parts = [x.narrow for x in operands if isinstance(x, _Wide) and not x.eqn]
        is_one_kind = len(parts) == len(operands) and len({x.dtype for x in parts}) == 1
        return [_Wide(*jax_compat.bind(eqn, parts))] if is_one_kind else None

    def move(x: Any) -> list[Any]:
        if any(x is narrow for narrow in array.arrays):
            return jax_compat.bind(eqn, [x, *([np.zeros((), x.dtype)] if is_pad else operands[1:])])
        if is_pad or not np.ndim(x):
            return [x] * len(eqn.outvars)
        whole = lax.broadcast_in_dim(x, shape, range(len(shape)))
        return jax_compat.bind(eqn, [whole, *operands[1:]])

    return None if is_pad and not _keeps_zeros(eqn, array) else _changed(array, move, {})


def _changed(x: Any, move: Callable[[Any], list[Any]], found: dict[int, list[Any]]) -> list[Any]:
    """Return for each result of a move what is computed of the moved arrays."""
    if id(x) not in found and isinstance(x, _Wide):
        parts = zip(*(_changed(y, move, found) for y in (x.narrow, *x.operands)), strict=True)
        found[id(x)] = [_Wide(y, x.eqn, tuple(operands), x.is_alone) for y, *operands in parts]
    elif id(x) not in found:
        found[id(x)] = move(x)
    return found[id(x)]


def _keeps_zeros(pad: JaxprEqn, array: _Wide) -> bool:
    """Return whether zeros are put beside an array that is multiplied by the same along there."""
    fill, edges = pad.invars[1], pad.params["padding_config"]
    axes = [axis for axis, edge in enumerate(edges) if any(edge)]

    def keeps(x: Any) -> bool:
        if isinstance(x, _Wide):
            return not x.eqn or (x.eqn.primitive is lax.mul_p and all(map(keeps, x.operands)))
        return all(np.shape(x)[axis : axis + 1] in ((), (1,)) for axis in axes)

    return isinstance(fill, Literal) and jax_compat.literal_value(fill) == 0 and keeps(array)
