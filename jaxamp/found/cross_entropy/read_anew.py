"""Compute what is elementwise of logits anew for each equation that reads it.

XLA:GPU computes an exponential or a `tanh` once for all its readers, and stores it in float32. Each
of them reads logits in 16 bits instead, behind a barrier that keeps the copies apart. Elsewhere
there is no barrier: behind one a rounding is kept that XLA may leave out before it, and an
exponential of rounded logits that a sum of others divides is no probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Primitive

from jaxamp.core import jax_compat
from jaxamp.core.define import define
from jaxamp.core.taxonomy import OpKind, Trait
from jaxamp.found.cross_entropy.rows import is_elementwise
from jaxamp.jaxprs.interpret import walk

apart_p = Primitive("read_anew")
apart_p.multiple_results = True


@dataclass(slots=True, eq=False)
class _Value:
    """A value of a chunk.

    Attributes:
      array: the value; ``None`` if each reader computes it.
      is_logits: whether a product makes it.
      has_reader: whether an equation has read it, or what is elementwise of it.
      eqn: the equation that computes it for a reader.
      operands: of that equation.
    """

    array: Any = None
    is_logits: bool = False
    has_reader: bool = False
    eqn: JaxprEqn | None = None
    operands: Sequence[Any] = ()


def read_anew(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function of arrays."""

    def each(*given: Any) -> Any:
        closed, shapes = jax.make_jaxpr(body, return_shape=True)(*given)
        products = [e for e in closed.jaxpr.eqns if e.primitive.name == "dot_general"]
        size: int = products[0].outvars[0].aval.size  # type: ignore[attr-defined]

        def visit(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[_Value]:
            name = eqn.primitive.name
            is_waiting = is_elementwise(eqn) or name in ("broadcast_in_dim", "iota")
            if is_waiting and 2 * eqn.outvars[0].aval.size >= size:  # type: ignore[attr-defined]
                return [_Value(eqn=eqn, operands=operands)]
            arrays = _read(operands, size)
            is_product = name == "dot_general"
            for value, array in zip(operands, arrays, strict=True):
                if is_product and isinstance(value, _Value):
                    value.array = array  # what products read is stored
            with jax_compat.emitting(eqn):
                results = jax_compat.bind(eqn, arrays)
            return [_Value(array, is_logits=is_product) for array in results]

        consts, inputs = ([*map(_Value, x)] for x in (closed.consts, jax.tree.leaves(given)))
        results = _read(walk(closed.jaxpr, consts, inputs, visit), size)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return each


def _read(operands: Sequence[Any], size: int) -> list[Any]:
    """Return operands of one reader, for which logits of such a size are put behind a barrier."""
    found = dict.fromkeys(v for v in operands if isinstance(v, _Value) and v.array is None)
    pending = [*found]
    while pending:
        for value in pending.pop().operands:
            if isinstance(value, _Value) and value not in found:
                found[value] = None
                pending.append(value)
    sources = [value for value in found if value.array is not None]
    logits = [value for value in sources if value.is_logits]
    copies: dict[Any, Any] = {}
    if any(value.has_reader for value in logits):
        own = [v for v in sources if v.is_logits or v.array.size < size]
        copies |= zip(own, apart_p.bind(*(v.array for v in own)), strict=True)
        for value in logits:
            value.array = copies[value]  # the next barrier is another one: XLA joins equal ones
    for value in logits:
        value.has_reader = True
    return [_array(value, copies) for value in operands]


def _array(value: Any, copies: dict[Any, Any]) -> Any:
    """Return an operand, computed for one reader if it waits for that."""
    if not isinstance(value, _Value):
        return value
    if value not in copies and value.array is not None:
        return value.array
    if value not in copies:
        assert value.eqn is not None
        operands = [_array(operand, copies) for operand in value.operands]
        with jax_compat.emitting(value.eqn):
            (copies[value],) = jax_compat.bind(value.eqn, operands)
    return copies[value]


def _same(*values: Any) -> list[Any]:
    return [*values]


def _apart(*values: Any) -> list[Any]:
    """Put each value behind its own barrier: XLA:GPU overwrites no operand that was in a tuple."""
    return [*map(lax.optimization_barrier, values)]


def _beside(values: Sequence[Any], others: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return apart_p.bind(*values), [*others]


define(
    apart_p, _same, _same, _beside, _beside, {None: _same, "cuda": _apart, "rocm": _apart},
    kind=OpKind.DATA_MOVEMENT, trait=Trait.SHAPE,
)  # fmt: skip
