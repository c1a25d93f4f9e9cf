"""Arrays that a program computes from known numbers alone, such as causal masks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from jaxamp.attention.levels import Atom, Level, Unit
from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import Trait, lookup
from jaxamp.jaxprs.nested import nested

_LARGEST = 1 << 26
_OPAQUE = frozenset(
    {Trait.CALLBACK, Trait.STATE, Trait.OPAQUE, Trait.BITS, Trait.TOKEN, Trait.LINALG}
)
_RANDOM = ("random_bits", "random_seed", "random_wrap", "random_unwrap", "threefry2x32")

_SPREAD = frozenset(
    {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "convert_element_type", "copy"}
)
_TYPES = frozenset({"pvary", "pcast", "reshard"})  # which no number depends on
_PLACES = ("sharding", "out_sharding")  # parameters that none depends on either


class Outer(NamedTuple):
    """A known value of the level around."""

    known: KnownNumbers
    atom: Atom


Given = Mapping[int, Outer]


class KnownNumbers:
    """The known arrays of a level; each is computed once, and only if it is asked for."""

    def __init__(self, level: Level, given: Given) -> None:
        self._level, self._given = level, given
        self._values: dict[int, Any] = {}
        self._computed: dict[Any, list[Any]] = {}  # per primitive, parameters and operands
        self._sources: dict[int, Outer] = {}  # of what has the same number in every place

    @functools.cached_property
    def _thunks(self) -> dict[int, Callable[[], Any]]:
        """Functions that compute the known values."""
        level, thunks = self._level, dict[int, Callable[[], Any]]()
        for index, entry in enumerate(level.entries):
            if index in self._given:
                outer = self._sources[entry] = self._given[index]
                thunks[entry] = lambda outer=outer: outer.known.value(outer.atom)
        for value, const in level.constants.items():
            if not isinstance(const, Tracer) and hasattr(const, "dtype"):
                thunks[value] = lambda const=const: const
        for unit in level.equations():
            self._follow(unit, thunks)
        return thunks

    def is_known(self, atom: Atom) -> bool:
        """Return whether a value is computed from known numbers alone."""
        return isinstance(atom, Literal) or atom in self._thunks

    def number(self, atom: Atom) -> float | None:
        """Return the one real number that a known value is in every place; ``None`` for others.

        An array is not computed for that: it is what one number was spread to.
        """
        if not self.is_known(atom):
            return None
        if not isinstance(atom, Literal) and atom in self._sources:
            outer = self._sources[atom]
            return outer.known.number(outer.atom)
        aval = atom.aval if isinstance(atom, Literal) else self._level.avals[atom]
        return one_number(self.value(atom)) if getattr(aval, "size", 0) == 1 else None

    def value(self, atom: Atom) -> np.ndarray:
        """Return a known value."""
        if isinstance(atom, Literal):
            return np.asarray(jax_compat.literal_value(atom))
        if atom not in self._values:
            with jax.ensure_compile_time_eval():
                self._values[atom] = self._thunks[atom]()
        return self._values[atom]

    def _follow(self, unit: Unit, thunks: dict[int, Callable[[], Any]]) -> None:
        eqn = unit.eqn
        if not all(isinstance(a, Literal) or a in thunks for a in unit.ins):
            return
        op = lookup(eqn.primitive)
        if op is None or op.trait in _OPAQUE or eqn.effects or nested(eqn):
            return
        if eqn.primitive.name in _RANDOM:
            return
        if any(not _is_small(v.aval) for v in eqn.outvars):
            return
        for index, out in enumerate(unit.outs):
            if isinstance(out, int):
                if eqn.primitive.name in _SPREAD | _TYPES:
                    self._sources[out] = Outer(self, unit.ins[0])
                if eqn.primitive.name in _TYPES:
                    thunks[out] = lambda: self.value(unit.ins[0])
                    continue
                thunks[out] = lambda index=index: self._results(unit)[index]

    def _results(self, unit: Unit) -> list[Any]:
        key = self._key(unit)
        results = self._computed.get(key)
        if results is None:
            operands = [jax.numpy.asarray(self.value(a)) for a in unit.ins]
            nowhere = {name: None for name in _PLACES if unit.eqn.params.get(name) is not None}
            results = [np.asarray(r) for r in jax_compat.bind(unit.eqn, operands, **nowhere)]
            if key is not None:
                self._computed[key] = results
        for out, result in zip(unit.outs, results, strict=True):
            if isinstance(out, int):
                self._values[out] = result
        return results

    def _key(self, unit: Unit) -> Any:
        """Return what equal equations of equal operands share, as the masks of all layers do."""
        operands = [id(self.value(a)) if isinstance(a, int) else _number(a) for a in unit.ins]
        key = (unit.eqn.primitive, tuple(unit.eqn.params.items()), tuple(operands))
        try:
            hash(key)
        except TypeError:
            return None
        return key


def _number(literal: Literal) -> Any:
    value = np.asarray(jax_compat.literal_value(literal))
    return value.dtype.str, value.shape, value.tobytes()


def one_number(array: Any) -> float | None:
    """Return the one real number of an array; ``None`` for others."""
    if np.size(array) != 1 or jax.numpy.result_type(array).kind not in "fiubV":
        return None
    return float(np.asarray(array).reshape(()))


def _is_small(aval: Any) -> bool:
    shape = getattr(aval, "shape", None)
    if shape is None or not all(isinstance(n, int) for n in shape):
        return False
    return math.prod(shape) <= _LARGEST and not jax_compat.is_ref(aval)
