"""Compute what is elementwise of logits anew for each equation that reads it.

XLA:GPU computes an exponential or a `tanh` once for all its readers, and stores it in float32. Each
of them reads logits in 16 bits instead, behind a barrier that keeps the copies apart. Elsewhere
there is no barrier: behind one a rounding is kept that XLA may leave out before it, and an
exponential of rounded logits that a sum of others divides is no probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Primitive

from jaxamp.core import jax_compat
from jaxamp.core.define import define_marker
from jaxamp.core.taxonomy import OpKind, Trait, is_by_element
from jaxamp.found.cross_entropy.logits import MOVES
from jaxamp.jaxprs.interpret import walk

apart_p = Primitive("read_anew")
apart_p.multiple_results = True


@dataclass(slots=True, eq=False)
class _Value:
    """A value of a chunk."""

    shape: tuple[int, ...]
    array: Any = None  # the value; ``None`` if each reader computes it
    is_logits: bool = False  # whether a product makes it, or it is moved from what one makes
    has_reader: bool = False  # whether an equation has read it, or what is elementwise of it
    eqn: JaxprEqn | None = None  # the equation that computes it for a reader
    operands: Sequence[Any] = ()  # of that equation


def read_anew(
    body: Callable[..., Any], *, in_rows: bool = False, slices: int = 1
) -> Callable[..., Any]:
    """Return the same function of arrays.

    The first of its products are the logits, of its larger operand, a matrix, which so many
    products as there are slices read. With `in_rows` logits have two axes here, whatever they have
    in the program: those of XLA's products. XLA:GPU writes cotangents over logits if nothing reads
    them in another shape.
    """

    def each(*given: Any) -> Any:
        closed, shapes = jax.make_jaxpr(body, return_shape=True)(*given)
        logits = next(e for e in closed.jaxpr.eqns if e.primitive.name == "dot_general")
        chunk = _Chunk(logits, in_rows, slices)
        consts, inputs = (
            [_Value(jnp.shape(x), x) for x in arrays]
            for arrays in (closed.consts, jax.tree.leaves(given))
        )
        results = chunk.read(walk(closed.jaxpr, consts, inputs, chunk.visit))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return each


class _Chunk(NamedTuple):
    """A chunk of tokens."""

    logits: JaxprEqn  # the product that makes its logits
    in_rows: bool  # whether these have two axes
    slices: int  # how many products read the matrix in

    @property
    def size(self) -> int:
        """The number of logits."""
        return self.logits.outvars[0].aval.size  # type: ignore[attr-defined]

    def visit(self, eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[_Value]:
        """Return the results of an equation."""
        shapes = [v.aval.shape for v in eqn.outvars]  # type: ignore[attr-defined]
        name = eqn.primitive.name
        is_waiting = is_by_element(eqn.primitive) or name in ("broadcast_in_dim", "iota")
        if is_waiting and 2 * math.prod(shapes[0]) >= self.size:
            return [_Value(shapes[0], eqn=eqn, operands=operands)]
        arrays = self.read(operands)
        is_product = name == "dot_general"
        is_moved = name in MOVES and any(isinstance(v, _Value) and v.is_logits for v in operands)
        for value, array in zip(operands, arrays, strict=True):
            if is_product and isinstance(value, _Value):
                value.array = array  # what products read is stored
        with jax_compat.emitting(eqn):
            results = self.bound(eqn, arrays)
        is_logits = is_product or is_moved
        return [_Value(*made, is_logits, is_moved) for made in zip(shapes, results, strict=True)]

    def bound(self, eqn: JaxprEqn, arrays: Sequence[Any]) -> Sequence[Any]:
        """Return the results of an equation of arrays, if of the matrix then of its slices."""
        first = self.logits
        matrix: Any = max(first.invars, key=lambda v: v.aval.size)  # type: ignore[attr-defined]
        if self.slices == 1 or eqn.primitive is not first.primitive or matrix not in eqn.invars:
            return jax_compat.bind(eqn, arrays)
        (contracted,) = first.params["dimension_numbers"][0][first.invars.index(matrix)]
        side = eqn.invars.index(matrix)
        return [_in_slices(eqn, arrays, side, 1 - contracted, self.slices)]

    def read(self, operands: Sequence[Any]) -> list[Any]:
        """Return operands of one reader, for which logits are put behind a barrier."""
        found = dict.fromkeys(v for v in operands if isinstance(v, _Value) and v.array is None)
        pending = [*found]
        while pending:
            for value in pending.pop().operands:
                if isinstance(value, _Value) and value not in found:
                    found[value] = None
                    pending.append(value)
        sources = [value for value in found if value.array is not None]
        logits = [value for value in sources if value.is_logits]
        copies: dict[_Value, Any] = {}
        if any(value.has_reader for value in logits):
            own = [v for v in sources if v.is_logits or v.array.size < self.size]
            arrays = apart_p.bind(*(self.rows(v.array) if v.is_logits else v.array for v in own))
            copies |= zip(own, arrays, strict=True)
            for value in logits:  # the next barrier is another one: XLA joins equal ones
                value.array = _shaped(copies[value], value.shape)
        for value in logits:
            value.has_reader = True
        return [self.array(value, copies) for value in operands]

    def rows(self, array: Any) -> Any:
        """Return an array with one axis of rows and one of words."""
        if not self.in_rows or array.ndim <= 2:
            return array
        return _shaped(array, (math.prod(array.shape[:-1]), array.shape[-1]))

    def array(self, value: Any, copies: dict[_Value, Any]) -> Any:
        """Return an operand."""
        if not isinstance(value, _Value):
            return value
        if value not in copies and value.array is not None:
            return value.array
        return _shaped(self.computed(value, copies), value.shape)

    def computed(self, value: Any, copies: dict[_Value, Any]) -> Any:
        """Return an operand in rows, computed for one reader if it waits for that."""
        if not isinstance(value, _Value):
            return value
        if value in copies or value.array is not None:
            return self.rows(copies.get(value, value.array))
        eqn = value.eqn
        assert eqn is not None
        is_placed = eqn.primitive.name == "sharding_constraint"
        rows = (), value.shape[:-1], (1,) * len(value.shape[:-1])
        is_alike = all(v.shape[:-1] in rows for v in value.operands if isinstance(v, _Value))
        is_of_rows = is_by_element(eqn.primitive) and is_alike and not is_placed
        form = self.computed if is_of_rows else self.array
        operands = [form(operand, copies) for operand in value.operands]
        with jax_compat.emitting(eqn):
            (result,) = jax_compat.bind(eqn, operands)
        copies[value] = self.rows(result)
        return copies[value]


def _in_slices(eqn: JaxprEqn, operands: Sequence[Any], side: int, words: int, count: int) -> Any:
    """Return the result of a product that reads a matrix for some words at a time.

    No copy in 16 bits of all words is then in memory, which is as large as the logits of as many
    tokens as a token has numbers. The matrix, of two axes, is the operand of that `side`, and
    `words` its axis of words, which the number of slices divides.
    """
    shape, axes = eqn.outvars[0].aval.shape, {side: words}  # type: ignore[attr-defined]
    size = operands[side].shape[words] // count
    contracted = eqn.params["dimension_numbers"][0]
    if is_summed := contracted[side] == (words,):
        axes[1 - side] = contracted[1 - side][0]

    def part(start: Any) -> Any:
        cut = {i: lax.dynamic_slice_in_dim(operands[i], start, size, a) for i, a in axes.items()}
        return jax_compat.bind(eqn, [cut.get(i, array) for i, array in enumerate(operands)])[0]

    starts = size * jnp.arange(count, dtype=jnp.int32)
    if is_summed:
        nothing = lax.full_like(operands[1 - side], 0, shape=shape)
        return lax.scan(lambda total, start: (total + part(start), None), nothing, starts)[0]
    return jnp.moveaxis(lax.map(part, starts), 0, side * (len(shape) - 1)).reshape(shape)


def _shaped(array: Any, shape: tuple[int, ...]) -> Any:
    return array if array.shape == shape else lax.reshape(array, shape)


def _apart(*values: Any) -> list[Any]:
    """Put each value behind its own barrier: XLA:GPU overwrites no operand that was in a tuple."""
    return [*map(lax.optimization_barrier, values)]


_LOWERED = {"cuda": _apart, "rocm": _apart}
define_marker(apart_p, _LOWERED, kind=OpKind.DATA_MOVEMENT, trait=Trait.SHAPE)
