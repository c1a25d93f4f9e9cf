"""Arrays that a program computes of known numbers alone: causal masks, bands, tables of waves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import Trait, is_by_element, lookup, op_of
from jaxamp.jaxprs.hashing import literal_key, params_key
from jaxamp.jaxprs.nested import nested

Atom = int | Literal
"""The number of a value of a program, or a literal."""

Shape = tuple[int, ...]
Make = Callable[["KnownArrays"], Any]
"""What makes an array, of those that are known: it holds none of these, which would be a cycle."""

_OPAQUE = frozenset(
    {
        *(Trait.CALLBACK, Trait.STATE, Trait.OPAQUE, Trait.BITS, Trait.TOKEN),
        *(Trait.ALLREDUCE, Trait.COLLECTIVE),  # of other devices, too
    }
)
_AS_IT_IS = (Trait.SAME, Trait.PLACEMENT, Trait.VARY)  # types, which no number depends on


class KnownArrays:
    """The known ones among numbered values; each is computed once, and only if it is asked for.

    An array is kept thin, of size one along each axis that it repeats along, as a mask of all
    heads does: `jax.nn.dot_product_attention` makes its causal mask for each head.
    """

    def __init__(self, avals: Sequence[Any], largest: int) -> None:
        """Start with no value of such types known; larger arrays, thin, are left unknown."""
        self._avals, self._largest = avals, largest
        self._makers: dict[int, Make] = {}  # of thin arrays
        self._shapes: dict[int, Shape] = {}  # of these
        self._thin: dict[int, np.ndarray] = {}
        # Equal equations of equal operands share results, as the masks of all layers do.
        self._computed: dict[Any, list[Any]] = {}

    def __contains__(self, atom: Atom) -> bool:
        return isinstance(atom, Literal) or atom in self._makers

    def enter(self, value: int, shape: Shape, make: Make) -> None:
        """Enter a known array, of size one along axes that it repeats along, and what makes it."""
        self._shapes[value], self._makers[value] = shape, make

    def follow(self, eqn: JaxprEqn, ins: Sequence[Atom], outs: Sequence[Atom]) -> None:
        """Enter what an equation makes, if it is known."""
        if not all(atom in self for atom in ins) or not _is_pure(eqn):
            return
        shapes = [_shape(var.aval) for var in eqn.outvars]
        thin = self._thinly(eqn, ins) if shapes and shapes[0] is not None else None
        read = [self._shape(atom) for atom in ins]
        if thin is not None:
            shapes, read = [thin[0]], []
        if any(s is None or math.prod(s) > self._largest for s in (*shapes, *read)):
            return
        make = thin and thin[1]
        for index, (out, shape) in enumerate(zip(outs, shapes, strict=True)):
            if isinstance(out, int):
                self.enter(out, shape or (), lambda it, i=index: it._results(eqn, ins, make)[i])

    def number(self, atom: Atom) -> float | None:
        """Return the one real number that a known value is in every place; ``None`` for others."""
        if atom not in self or math.prod(self.thin_shape(atom)) != 1:
            return None
        return one_number(self.thin(atom))

    def whole(self, atom: Atom) -> np.ndarray:
        """Return a known array; what is repeated in it takes no memory."""
        return np.broadcast_to(self.thin(atom), self._shape(atom))

    def thin(self, atom: Atom) -> np.ndarray:
        """Return a known array, of size one along axes that it repeats along."""
        if isinstance(atom, Literal):
            return np.asarray(jax_compat.literal_value(atom))
        if atom not in self._thin:
            with jax_compat.evaluating():
                self._thin[atom] = self._makers[atom](self)
        return self._thin[atom]

    def thin_shape(self, atom: Atom) -> Shape:
        """Return the shape of a known array as `thin` returns it."""
        if isinstance(atom, Literal):
            return np.shape(jax_compat.literal_value(atom))
        return self._shapes[atom]

    def _shape(self, atom: Atom) -> Shape:
        return _shape(atom.aval if isinstance(atom, Literal) else self._avals[atom]) or ()

    def _thinly(
        self, eqn: JaxprEqn, ins: Sequence[Atom]
    ) -> tuple[Shape, Callable[..., Any]] | None:
        """Return the shape of a thin result, and the function of thin operands that makes it.

        ``None`` where it is made of whole ones.
        """
        params, shape = eqn.params, _shape(eqn.outvars[0].aval) or ()
        operands = [self.thin_shape(atom) for atom in ins]
        match eqn.primitive.name:
            case "iota":
                axis, dtype = params["dimension"], params["dtype"]
                own = tuple(n if i == axis else 1 for i, n in enumerate(shape))
                return own, lambda: np.arange(math.prod(own), dtype=dtype).reshape(own)
            case "transpose":
                order = params["permutation"]
                return tuple(operands[0][i] for i in order), lambda x: np.transpose(x, order)
            case "broadcast_in_dim":
                sizes = dict(zip(params["broadcast_dimensions"], operands[0], strict=True))
                moved = tuple(sizes.get(i, 1) for i in range(len(shape)))
            case "reshape" | "squeeze":  # with axes of size one elsewhere
                before = self._shape(ins[0])
                if [n for n in before if n != 1] != [n for n in shape if n != 1]:
                    return None
                rest = iter([k for n, k in zip(before, operands[0], strict=True) if n != 1])
                moved = tuple(1 if n == 1 else next(rest) for n in shape)
            case _ if op_of(eqn.primitive).trait in _AS_IT_IS:
                moved = operands[0]
            case _ if is_by_element(eqn.primitive):
                own = np.broadcast_shapes((1,) * len(shape), *operands)
                return own, lambda *xs: jax_compat.computed(eqn, [_spread(x, own) for x in xs])[0]
            case _:
                return None
        return moved, lambda x: np.reshape(x, moved)

    def _results(
        self, eqn: JaxprEqn, ins: Sequence[Atom], make: Callable[..., Any] | None
    ) -> list[np.ndarray]:
        operands = [id(self.thin(a)) if isinstance(a, int) else literal_key(a) for a in ins]
        key = (eqn.primitive, params_key(eqn.params), *operands)
        results = self._computed.get(key)
        if results is None:
            if make is None:
                found = jax_compat.computed(eqn, [self.whole(atom) for atom in ins])
            else:
                found = [make(*map(self.thin, ins))]
            results = self._computed[key] = [np.asarray(result) for result in found]
        return results


def _is_pure(eqn: JaxprEqn) -> bool:
    """Return whether an equation computes the same whenever it is asked, and on any device."""
    op = lookup(eqn.primitive)
    if op is None or op.trait in _OPAQUE or eqn.effects or nested(eqn):
        return False
    return bool(eqn.invars) or eqn.primitive.name == "iota"


def _spread(operand: Any, shape: Shape) -> Any:
    """Return an operand in a shape; a scalar, as the predicate of a selection may be, as it is."""
    return jax.numpy.broadcast_to(operand, shape) if np.ndim(operand) else operand


def one_number(array: Any) -> float | None:
    """Return the one real number of an array; ``None`` for others."""
    dtype = jax.numpy.result_type(array)
    if np.size(array) != 1 or dtype.kind not in "fiubV" or dtype == jax.dtypes.float0:
        return None
    return float(np.asarray(array).reshape(()))


def _shape(aval: Any) -> Shape | None:
    """Return the shape of an array; ``None`` for what has none, or not in numbers."""
    shape = getattr(aval, "shape", None)
    if shape is None or jax_compat.is_ref(aval) or not all(isinstance(n, int) for n in shape):
        return None
    return tuple(shape)
