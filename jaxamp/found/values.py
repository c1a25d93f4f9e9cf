"""Values over named axes, and how two of them come to have the same axes.

An axis of an array is a product of parts, so that a reshape only names the parts anew.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Axis:
    """An axis, or part of one, of a value; known by its identity."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


Place = tuple[Axis, ...]  # an axis of an array as the product of parts, the outer ones first


class Factor(NamedTuple):
    """A tensor along axes of a value: one place for each axis of its own."""

    base: int
    places: tuple[Place, ...]

    @property
    def axes(self) -> frozenset[Axis]:
        """All axes that it extends along."""
        return frozenset(itertools.chain.from_iterable(self.places))


Monomial = frozenset[tuple[Factor, int]]
ONE: Monomial = frozenset()


@dataclass(frozen=True, slots=True)
class Value:
    """A sum of monomials over the axes of an array."""

    places: tuple[Place, ...]
    terms: Mapping[Monomial, float]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes, in order."""
        return tuple(itertools.chain.from_iterable(self.places))

    @property
    def factors(self) -> list[Factor]:
        """The tensors in it, term by term."""
        return [factor for monomial in self.terms for factor, _ in monomial]

    @property
    def number(self) -> float | None:
        """The number that it is in every place; ``None`` for others."""
        if not self.terms:
            return 0.0
        return self.terms.get(ONE) if len(self.terms) == 1 else None

    @property
    def single(self) -> tuple[Factor, float] | None:
        """The one tensor that it is a multiple of; ``None`` for others."""
        if len(self.terms) != 1:
            return None
        (monomial, number), *_ = self.terms.items()
        if len(monomial) != 1:
            return None
        ((factor, power),) = monomial
        return (factor, number) if power == 1 else None


def fresh_places(shape: Sequence[int]) -> tuple[Place, ...]:
    """Return new axes for a shape; an axis of size one is none."""
    return tuple((Axis(n),) if n != 1 else () for n in shape)


def single(base: int, own: Sequence[Place], places: tuple[Place, ...]) -> Value:
    """Return a tensor along some axes as a value over places."""
    return Value(places, {frozenset([(Factor(base, tuple(own)), 1)]): 1.0})


def size_of(place: Iterable[Axis]) -> int:
    """Return the size of an axis of an array, the product of its parts."""
    return math.prod(axis.size for axis in place)


def divided(places: Iterable[Place], parts: Mapping[Axis, Place]) -> tuple[Place, ...]:
    """Return places with other axes in the place of some."""
    return tuple(tuple(b for a in place for b in parts.get(a, (a,))) for place in places)


def substituted(value: Value, parts: Mapping[Axis, Place]) -> Value:
    """Return a value with other axes in the place of some."""
    if not parts:
        return value
    terms = {
        frozenset((Factor(f.base, divided(f.places, parts)), p) for f, p in m): n
        for m, n in value.terms.items()
    }
    return Value(divided(value.places, parts), terms)


def renamed(value: Value) -> Value:
    """Return a value over axes of its own."""
    return substituted(value, {a: (Axis(a.size),) for a in value.axes})


def refine(first: Place, second: Place) -> dict[Axis, Place] | None:
    """Return replacements after which two products of axes are the same; ``None`` if none are.

    Both are cut wherever one of them is; what is a whole axis of the first stays that.
    """
    ends = [(1, *itertools.accumulate((a.size for a in p), operator.mul)) for p in (first, second)]
    cuts = sorted({*ends[0], *ends[1]})
    if ends[0][-1] != ends[1][-1] or 0 in cuts or any(b % a for a, b in itertools.pairwise(cuts)):
        return None
    whole = dict(zip(itertools.pairwise(ends[0]), first, strict=True))
    pieces = [
        (start, whole.get((start, stop)) or Axis(stop // start))
        for start, stop in itertools.pairwise(cuts)
    ]
    parts: dict[Axis, Place] = {}
    for own, place in zip(ends, (first, second), strict=True):
        for axis, (start, stop) in zip(place, itertools.pairwise(own), strict=True):
            part = tuple(piece for at, piece in pieces if start <= at < stop)
            if part != (axis,):
                parts[axis] = part
    return parts


def align(first: Value, second: Value) -> tuple[Value, Value] | None:
    """Return two values over the same axes; a number goes with any shape."""
    if first.places == second.places:
        return first, second
    if not second.places or not first.places:  # of rank zero
        places = first.places or second.places
        return Value(places, first.terms), Value(places, second.terms)
    if len(first.places) != len(second.places):
        return None
    second, parts = renamed(second), dict[Axis, Place]()
    for own, other in zip(first.places, second.places, strict=True):
        if own and other:  # an axis of size one is repeated
            found = refine(own, other)
            if found is None:
                return None
            parts |= found
    first, second = substituted(first, parts), substituted(second, parts)
    places = tuple(a or b for a, b in zip(first.places, second.places, strict=True))
    return Value(places, first.terms), Value(places, second.terms)


def merging(value: Value) -> tuple[int, float, tuple[Any, ...]] | None:
    """Return what tells a tensor whose axes an array merges, as rows and columns; else ``None``.

    Arrays of which it is the same are equal: the tensor, what multiplies it, and the order of its
    axes.
    """
    if (single := value.single) is None:
        return None
    factor, number = single
    own = {a: (i, j) for i, place in enumerate(factor.places) for j, a in enumerate(place)}
    if not own.keys() >= set(value.axes) or not any(
        len({own[axis][0] for axis in place}) > 1 for place in value.places
    ):
        return None
    order = tuple(tuple((*own[axis], axis.size) for axis in place) for place in value.places)
    return factor.base, number, order


def reshaped(value: Value, shape: Sequence[int]) -> Value | None:
    """Return a value in another shape, row by row; ``None`` where axes do not divide."""
    places = fresh_places(shape)
    parts = refine(value.axes, tuple(itertools.chain.from_iterable(places)))
    return None if parts is None else substituted(Value(places, value.terms), parts)
