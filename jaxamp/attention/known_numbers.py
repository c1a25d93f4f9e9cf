"""Arrays that a program computes from known numbers alone, such as causal masks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal, Primitive

from jaxamp.attention.levels import Atom, Level, Unit
from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import OpKind, Trait, lookup
from jaxamp.jaxprs.nested import nested

_LARGEST = 1 << 26  # elements: the causal mask of 8,192 words
_OPAQUE = frozenset(
    {Trait.CALLBACK, Trait.STATE, Trait.OPAQUE, Trait.BITS, Trait.TOKEN, Trait.LINALG}
)
_RANDOM = ("random_bits", "random_seed", "random_wrap", "random_unwrap", "threefry2x32")

_UNIT_AXES = frozenset({"reshape", "squeeze", "expand_dims"})
_BITWISE = frozenset({"and", "or", "not", "xor", "convert_element_type"})
_TYPES = frozenset({"pvary", "pcast", "reshard"})  # which no number depends on
_PLACES = ("sharding", "out_sharding")  # parameters that none depends on either


class Outer(NamedTuple):
    """A known value of the level around."""

    known: KnownNumbers
    atom: Atom


Given = Mapping[int, Outer]
Shape = tuple[int, ...]


class KnownNumbers:
    """The known arrays of a level; each is computed once, and only if it is asked for.

    An array is kept thin, of size one along each axis that it repeats along, as a mask of all
    heads does: `jax.nn.dot_product_attention` makes its causal mask for each head.
    """

    def __init__(self, level: Level, given: Given) -> None:
        self._level, self._given = level, given
        self._thin: dict[int, np.ndarray] = {}
        self._computed: dict[Any, list[Any]] = {}  # per primitive, parameters and operands
        self._shapes: dict[int, Shape] = {}  # of thin arrays

    @functools.cached_property
    def _thunks(self) -> dict[int, Callable[[], Any]]:
        """Functions that compute the known values."""
        level, thunks = self._level, dict[int, Callable[[], Any]]()
        for index, entry in enumerate(level.entries):
            if index in self._given:
                outer = self._given[index]
                self._shapes[entry] = outer.known.thin_shape(outer.atom)
                thunks[entry] = lambda outer=outer: outer.known.thin(outer.atom)
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
            with jax.ensure_compile_time_eval():
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
        if eqn.primitive.name in _RANDOM:
            return
        shapes = [_shape(v.aval) for v in eqn.outvars]
        read = [self._shape(a) for a in unit.ins]
        if (thin := self._thin_result(unit)) is not None:
            shapes, read = [thin], []
        sized = [s for s in shapes if s is not None]
        if len(sized) < len(shapes) or any(math.prod(s) > _LARGEST for s in (*sized, *read)):
            return
        for index, out in enumerate(unit.outs):
            if isinstance(out, int):
                self._shapes[out] = sized[index]
                thunks[out] = lambda index=index: self._results(unit)[index]

    def _thin_result(self, unit: Unit) -> Shape | None:
        """Return the shape of a thin result; ``None`` where it is computed from whole operands."""
        eqn, name, shape = unit.eqn, unit.eqn.primitive.name, _shape(unit.eqn.outvars[0].aval)
        if shape is None:
            return None
        operands = [self.thin_shape(a) for a in unit.ins]
        if _is_elementwise(eqn.primitive):
            return np.broadcast_shapes((1,) * len(shape), *operands)
        if name == "iota":
            return tuple(n if i == eqn.params["dimension"] else 1 for i, n in enumerate(shape))
        if name == "broadcast_in_dim":
            sizes = dict(zip(eqn.params["broadcast_dimensions"], operands[0], strict=True))
            return tuple(sizes.get(i, 1) for i in range(len(shape)))
        if name == "transpose":
            return tuple(operands[0][i] for i in eqn.params["permutation"])
        if name in _TYPES:
            return operands[0]
        if name in _UNIT_AXES:
            before = self._shape(unit.ins[0])
            sizes = iter([k for n, k in zip(before, operands[0], strict=True) if n != 1])
            if [n for n in before if n != 1] == [n for n in shape if n != 1]:
                return tuple(1 if n == 1 else next(sizes) for n in shape)
        return None

    def _results(self, unit: Unit) -> list[Any]:
        key = self._key(unit)
        results = self._computed.get(key)
        if results is None:
            results = [np.asarray(r) for r in self._evaluate(unit)]
            if key is not None:
                self._computed[key] = results
        for out, result in zip(unit.outs, results, strict=True):
            if isinstance(out, int):
                self._thin[out] = result
        return results

    def _evaluate(self, unit: Unit) -> Sequence[Any]:
        eqn, name, shape = unit.eqn, unit.eqn.primitive.name, self._thin_result(unit)
        nowhere = {name: None for name in _PLACES if eqn.params.get(name) is not None}
        if shape is None:
            operands = [jax.numpy.asarray(self.value(a)) for a in unit.ins]
        elif _is_elementwise(eqn.primitive):
            operands = [_spread(jax.numpy.asarray(self.thin(a)), shape) for a in unit.ins]
        elif name == "iota":
            return [np.arange(math.prod(shape), dtype=eqn.params["dtype"]).reshape(shape)]
        elif name == "transpose":
            return [np.transpose(self.thin(unit.ins[0]), eqn.params["permutation"])]
        else:  # repeats, or has axes of size one elsewhere
            return [np.reshape(self.thin(unit.ins[0]), shape)]
        return jax_compat.bind(eqn, operands, **nowhere)

    def _key(self, unit: Unit) -> Any:
        """Return what equal equations of equal operands share, as the masks of all layers do."""
        operands = [id(self.thin(a)) if isinstance(a, int) else _number(a) for a in unit.ins]
        key = (unit.eqn.primitive, tuple(unit.eqn.params.items()), tuple(operands))
        try:
            hash(key)
        except TypeError:
            return None
        return key


def _is_elementwise(primitive: Primitive) -> bool:
    op = lookup(primitive)
    return primitive.name in _BITWISE or (op is not None and op.kind is OpKind.ELEMENTWISE)


def _spread(operand: Any, shape: Shape) -> Any:
    """Return an operand in a shape; a scalar, as the predicate of a selection may be, as it is."""
    return jax.numpy.broadcast_to(operand, shape) if operand.ndim else operand


def _number(literal: Literal) -> Any:
    value = np.asarray(jax_compat.literal_value(literal))
    return value.dtype.str, value.shape, value.tobytes()


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
