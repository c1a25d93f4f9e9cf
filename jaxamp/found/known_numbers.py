"""Arrays that a program computes from known numbers alone, such as causal masks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal, Primitive

from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import OpKind, Trait, lookup
from jaxamp.found.levels import Atom, Level, Unit
from jaxamp.jaxprs.hashing import literal_key, params_key
from jaxamp.jaxprs.nested import nested

_LARGEST = 1 << 26  # elements: the causal mask of 8,192 words
_OPAQUE = frozenset(
    {Trait.CALLBACK, Trait.STATE, Trait.OPAQUE, Trait.BITS, Trait.TOKEN, Trait.LINALG}
)

_BITWISE = frozenset({"and", "or", "not", "xor", "convert_element_type"})


Given = Mapping[int, tuple["KnownNumbers", Atom]]
"""Per input that is known, its level around and the value of it there."""

Shape = tuple[int, ...]
Thin = tuple[Shape, Callable[..., Any]]
"""The shape of a thin result, and the function of thin operands that makes it."""


class KnownNumbers:
    """The known arrays of a level; each is computed once, and only if it is asked for.

    An array is kept thin, of size one along each axis that it repeats along, as a mask of all
    heads does: `jax.nn.dot_product_attention` makes its causal mask for each head.
    """

    def __init__(self, level: Level, given: Given) -> None:
        self._level, self._given = level, given
        self._thin: dict[int, np.ndarray] = {}
        # Equal equations of equal operands share results, as the masks of all layers do.
        self._computed: dict[Any, list[Any]] = {}
        self._shapes: dict[int, Shape] = {}  # of thin arrays

    @functools.cached_property
    def _thunks(self) -> dict[int, Callable[[], Any]]:
        level, thunks = self._level, dict[int, Callable[[], Any]]()
        for index, entry in enumerate(level.entries):
            if index in self._given:
                known, atom = self._given[index]
                self._shapes[entry] = known.thin_shape(atom)
                thunks[entry] = functools.partial(known.thin, atom)
        for value, const in level.constants.items():
            if not isinstance(const, Tracer) and hasattr(const, "dtype"):
                self._shapes[value] = tuple(const.shape)
                thunks[value] = lambda const=const: const
        for unit in level.equations():
            self._follow(unit, thunks)
        return thunks

    def is_known(self, atom: Atom) -> bool:
        """Return whether a value is computed from known numbers alone."""
        return isinstance(atom, Literal) or atom in self._thunks

    def number(self, atom: Atom) -> float | None:
        """Return the one real number that a known value is in every place; ``None`` for others."""
        if not self.is_known(atom) or math.prod(self.thin_shape(atom)) != 1:
            return None
        return one_number(self.thin(atom))

    def value(self, atom: Atom) -> np.ndarray:
        """Return a known value; what is repeated in it takes no memory."""
        thin = self.thin(atom)
        return thin if isinstance(atom, Literal) else np.broadcast_to(thin, self._shape(atom))

    def thin(self, atom: Atom) -> np.ndarray:
        """Return a known value, of size one along axes that it repeats along."""
        if isinstance(atom, Literal):
            return np.asarray(jax_compat.literal_value(atom))
        if atom not in self._thin:
            with jax_compat.evaluating():
                self._thin[atom] = self._thunks[atom]()
        return self._thin[atom]

    def thin_shape(self, atom: Atom) -> Shape:
        """Return the shape of a known value as `thin` returns it."""
        if isinstance(atom, Literal):
            return np.shape(jax_compat.literal_value(atom))
        return self._shapes[atom]

    def _shape(self, atom: Atom) -> Shape:
        return _shape(atom.aval if isinstance(atom, Literal) else self._level.avals[atom]) or ()

    def _follow(self, unit: Unit, thunks: dict[int, Callable[[], Any]]) -> None:
        eqn = unit.eqn
        if not all(isinstance(a, Literal) or a in thunks for a in unit.ins):
            return
        op = lookup(eqn.primitive)
        if op is None or op.trait in _OPAQUE or eqn.effects or nested(eqn):
            return
        shapes = [_shape(v.aval) for v in eqn.outvars]
        read = [self._shape(a) for a in unit.ins]
        thin = self._thinly(unit) if shapes and shapes[0] is not None else None
        if thin is not None:
            shapes, read = [thin[0]], []
        sized = [s for s in shapes if s is not None]
        if len(sized) < len(shapes) or any(math.prod(s) > _LARGEST for s in (*sized, *read)):
            return
        for index, out in enumerate(unit.outs):
            if isinstance(out, int):
                self._shapes[out] = sized[index]
                thunks[out] = lambda index=index: self._results(unit, thin and thin[1])[index]

    def _thinly(self, unit: Unit) -> Thin | None:
        """Return how a result is made of thin operands; ``None`` where it takes whole ones."""
        eqn, params = unit.eqn, unit.eqn.params
        shape = _shape(eqn.outvars[0].aval) or ()
        operands = [self.thin_shape(a) for a in unit.ins]
        if _is_elementwise(eqn.primitive):
            common = np.broadcast_shapes((1,) * len(shape), *operands)
            return common, lambda *xs: jax_compat.computed(eqn, [_spread(x, common) for x in xs])[0]
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
            case "reshape" | "squeeze" | "expand_dims":  # with axes of size one elsewhere
                before = self._shape(unit.ins[0])
                if [n for n in before if n != 1] != [n for n in shape if n != 1]:
                    return None
                rest = iter([k for n, k in zip(before, operands[0], strict=True) if n != 1])
                moved = tuple(1 if n == 1 else next(rest) for n in shape)
            case "pvary" | "pcast" | "reshard":  # types, which no number depends on
                moved = operands[0]
            case _:
                return None
        return moved, lambda x: np.reshape(x, moved)

    def _results(self, unit: Unit, made: Callable[..., Any] | None) -> list[Any]:
        operands = [id(self.thin(a)) if isinstance(a, int) else literal_key(a) for a in unit.ins]
        key = (unit.eqn.primitive, params_key(unit.eqn.params), *operands)
        results = self._computed.get(key)
        if results is None:
            if made is None:
                found = jax_compat.computed(unit.eqn, [self.value(a) for a in unit.ins])
            else:
                found = [made(*(self.thin(a) for a in unit.ins))]
            results = self._computed[key] = [np.asarray(r) for r in found]
        for out, result in zip(unit.outs, results, strict=True):
            if isinstance(out, int):
                self._thin[out] = result
        return results


def _is_elementwise(primitive: Primitive) -> bool:
    op = lookup(primitive)
    return primitive.name in _BITWISE or (op is not None and op.kind is OpKind.ELEMENTWISE)


def _spread(operand: Any, shape: Shape) -> Any:
    """Return an operand in a shape; a scalar, as the predicate of a selection may be, as it is."""
    return jax.numpy.broadcast_to(operand, shape) if np.ndim(operand) else operand


def one_number(array: Any) -> float | None:
    """Return the one real number of an array; ``None`` for others."""
    if np.size(array) != 1 or jax.numpy.result_type(array).kind not in "fiubV":
        return None
    return float(np.asarray(array).reshape(()))


def _shape(aval: Any) -> Shape | None:
    shape = getattr(aval, "shape", None)
    if shape is None or jax_compat.is_ref(aval) or not all(isinstance(n, int) for n in shape):
        return None
    return tuple(shape)
