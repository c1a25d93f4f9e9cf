"""Values over named axes, and how two of them come to have the same axes.

An axis of an array is a product of parts, so that a reshape only names the parts anew.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Axis:
    """An axis, or part of one, of a value; known by its identity."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size

    def __repr__(self) -> str:
        return f"<{self.size}:{id(self) % 9973}>"


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


def size_of(place: Iterable[Axis]) -> int:
    """Return the size of an axis of an array, the product of its parts."""
    return math.prod(axis.size for axis in place)


def substituted(value: Value, parts: Mapping[Axis, Place]) -> Value:
    """Return a value with other axes in the place of some."""
    if not parts:
        return value

    def place(axes: Place) -> Place:
        if not any(a in parts for a in axes):
            return axes
        return tuple(itertools.chain.from_iterable(parts.get(a, (a,)) for a in axes))

    def factor(f: Factor) -> Factor:
        return Factor(f.base, tuple(map(place, f.places)))

    terms = {frozenset((factor(f), p) for f, p in m): n for m, n in value.terms.items()}
    return Value(tuple(map(place, value.places)), terms)


def renamed(value: Value) -> Value:
    """Return a value over axes of its own."""
    return substituted(value, {a: (Axis(a.size),) for a in value.axes})


def refine(first: Place, second: Place) -> dict[Axis, Place] | None:
    """Return replacements after which two products of axes are the same; ``None`` if none are."""
    parts: dict[Axis, Place] = {}
    left, right = list(reversed(first)), list(reversed(second))
    made: dict[Axis, list[Axis]] = {}
    while left and right:
        a, b = left.pop(), right.pop()
        if a.size == b.size:
            made.setdefault(b, []).append(a)
            made.setdefault(a, []).append(a)
        elif a.size > b.size and a.size % b.size == 0:
            outer, inner = Axis(b.size), Axis(a.size // b.size)
            _split(made, a, outer, inner)
            made.setdefault(b, []).append(outer)
            left.append(inner)
        elif b.size > a.size and b.size % a.size == 0:
            inner = Axis(b.size // a.size)
            _split(made, b, a, inner)
            made.setdefault(a, []).append(a)
            right.append(inner)
        else:
            return None
    if left or right:
        return None
    for axis in (*first, *second):
        place = tuple(_leaves(axis, made))
        if place != (axis,):
            parts[axis] = place
    return parts


def _split(made: dict[Axis, list[Axis]], axis: Axis, outer: Axis, inner: Axis) -> None:
    made[axis] = [outer, inner]


def _leaves(axis: Axis, made: Mapping[Axis, list[Axis]]) -> Iterable[Axis]:
    inside = made.get(axis, [axis])
    for part in inside:
        if part is axis or part not in made or made[part] == [part]:
            yield part
        else:
            yield from _leaves(part, made)


def align(first: Value, second: Value) -> tuple[Value, Value] | None:
    """Return two values over the same axes; a number goes with any shape."""
    if first.places == second.places:
        return first, second
    if not second.places or not first.places:  # of rank zero
        scalar, other = (second, first) if not second.places else (first, second)
        spread = Value(other.places, scalar.terms)
        return (other, spread) if scalar is second else (spread, other)
    if len(first.places) != len(second.places):
        return None
    if (names := _same_axes(first.places, second.places)) is not None:
        second = substituted(second, names)
        places = tuple(a or b for a, b in zip(first.places, second.places, strict=True))
        return Value(places, first.terms), Value(places, second.terms)
    second = renamed(second)
    for index in range(len(first.places)):
        if not (first.places[index] and second.places[index]):  # an axis of size one is repeated
            continue
        parts = refine(first.places[index], second.places[index])
        if parts is None:
            return None
        first, second = substituted(first, parts), substituted(second, parts)
    places = tuple(a or b for a, b in zip(first.places, second.places, strict=True))
    return Value(places, first.terms), Value(places, second.terms)


def _same_axes(first: Sequence[Place], second: Sequence[Place]) -> dict[Axis, Place] | None:
    """Return the axes of a value for those of another, if none is a product of parts."""
    names: dict[Axis, Place] = {}
    for own, other in zip(first, second, strict=True):
        if len(own) > 1 or len(other) > 1 or (own and other and own[0].size != other[0].size):
            return None
        if other:
            names[other[0]] = own or (Axis(other[0].size),)
    return names


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
    queue = list(reversed(value.axes))
    parts: dict[Axis, list[Axis]] = {}
    places: list[Place] = []
    for size in shape:
        place: list[Axis] = []
        missing = size
        while missing > 1:
            if not queue:
                return None
            axis = queue.pop()
            if missing % axis.size == 0:
                place.append(axis)
                missing //= axis.size
            elif axis.size % missing == 0:
                outer, inner = Axis(missing), Axis(axis.size // missing)
                parts[axis] = [outer, inner]
                place.append(outer)
                queue.append(inner)
                missing = 1
            else:
                return None
        places.append(tuple(place))
    if queue or 0 in shape:
        return None
    replaced = {a: tuple(_leaves(a, parts)) for a in value.axes if a in parts}
    inner = substituted(value, replaced)
    final = tuple(
        tuple(itertools.chain.from_iterable(_leaves(a, parts) for a in p)) for p in places
    )
    return Value(final, inner.terms)
