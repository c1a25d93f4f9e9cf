"""An algebra of tensors with named axes, in which what is made of softmaxes has a normal form.

A value is a sum of monomials; a monomial is a number times powers of tensors, each with the axes
of the value that it extends along. What no rule describes is a tensor of its own, a leaf. A
contraction is formal, `sum(factors, axes)`; only sums over scores are brought into one order, so
that ``Σ_h g·Σ_s e·v`` and ``Σ_s e·Σ_h g·v`` are the same. `exp` of scores is a tensor, and the sum
of it over keys is another: that weights sum up to one needs no rule.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxamp.found.values import (
    ONE,
    Axis,
    Factor,
    Monomial,
    Place,
    Value,
    align,
    fresh_places,
    single,
    substituted,
)

MOST_TERMS = 16
MOST_FACTORS = 8
_NEGLIGIBLE = 1e-6


@dataclass(slots=True)
class Base:
    """A tensor."""

    kind: str  # "leaf", "sum", "exp", "log" or "masked"
    sizes: tuple[int, ...]
    data: Any  # what it is made of, see `Algebra`
    exponentials: frozenset[int] = frozenset()  # of scores, in it
    masks: tuple[Factor, ...] = ()  # of an exponential, or of scores: where it is not zero


@dataclass(slots=True)
class Algebra:
    """All tensors of a program; equal ones have one number."""

    bases: list[Base] = field(default_factory=list)
    sums: dict[int, list[int]] = field(default_factory=dict)  # per exponential: sums that read it
    guarded: set[int] = field(default_factory=set)  # exponentials whose sums are compared
    masks_again: bool = False  # whether weights were masked again since this was reset
    _numbers: dict[Any, int] = field(default_factory=dict)

    def leaf(self, name: Any, shape: Sequence[int]) -> Value:
        """Return an array of the program of which nothing is known."""
        places = fresh_places(shape)
        return single(self._base("leaf", tuple(shape), name), places, places)

    def constant(self, number: float, shape: Sequence[int]) -> Value:
        """Return a number in every place."""
        return Value(fresh_places(shape), {ONE: number} if number else {})

    def exponentials(self, value: Value) -> frozenset[int]:
        """Return the exponentials of scores in a value."""
        return frozenset().union(*(self.bases[f.base].exponentials for f in value.factors))

    # Arithmetic.

    def add(self, first: Value, second: Value, sign: float = 1.0) -> Value | None:
        """Return a sum or difference; ``None`` where it is too long."""
        aligned = align(first, second)
        if aligned is None:
            return None
        first, second = aligned
        terms = dict(first.terms)
        for monomial, number in second.terms.items():
            total = terms.get(monomial, 0.0) + sign * number
            if abs(total) <= _NEGLIGIBLE * abs(number):
                terms.pop(monomial, None)
            else:
                terms[monomial] = total
        return Value(first.places, terms) if len(terms) <= MOST_TERMS else None

    def multiply(self, first: Value, second: Value) -> Value | None:
        """Return a product; ``None`` where it is too long."""
        aligned = align(first, second)
        return None if aligned is None else self._product(*aligned)

    def divide(self, first: Value, second: Value) -> Value | None:
        """Return a quotient by a monomial; ``None`` by anything else."""
        inverse = self.power(second, -1)
        return None if inverse is None else self.multiply(first, inverse)

    def power(self, value: Value, exponent: int) -> Value | None:
        """Return an integer power of a monomial."""
        if len(value.terms) != 1:
            return None
        ((monomial, number),) = value.terms.items()
        if number == 0 or not math.isfinite(number):
            return None
        powers = frozenset((f, p * exponent) for f, p in monomial)
        return Value(value.places, {powers: float(number) ** exponent})

    def scale(self, value: Value, number: float) -> Value:
        """Return a value times a number."""
        if number == 0:
            return Value(value.places, {})
        return Value(value.places, {m: n * number for m, n in value.terms.items()})

    def _product(self, first: Value, second: Value) -> Value | None:
        """Return the product of values over the same axes."""
        terms: dict[Monomial, float] = {}
        for (m, a), (n, b) in itertools.product(first.terms.items(), second.terms.items()):
            monomial = self._unmasked(_times(m, n))
            if len(monomial) > MOST_FACTORS:
                return None
            terms[monomial] = terms.get(monomial, 0.0) + a * b
        size = max((abs(n) for n in terms.values()), default=0.0)
        kept = {m: n for m, n in terms.items() if abs(n) > _NEGLIGIBLE * size}
        return Value(first.places, kept) if len(kept) <= MOST_TERMS else None

    def _unmasked(self, monomial: Monomial) -> Monomial:
        """Leave out masks outside of which an exponential in the monomial is zero anyway.

        It is not where a row is masked whole: that weights are masked so is noted.
        """
        powers = dict(monomial)
        is_met = False
        for factor, power in monomial:
            base = self.bases[factor.base]
            for mask in base.masks if base.kind == "exp" and power > 0 else ():
                is_met |= powers.pop(placed(mask, factor.places), None) is not None
        self.masks_again |= is_met and all(self.is_weight(f.base) for f in powers)
        return frozenset(powers.items())

    def is_weight(self, base: int) -> bool:
        """Return whether a tensor is an exponential of scores, or a sum of one alone."""
        found = self.bases[base]
        if found.kind == "exp":
            return True
        return found.kind == "sum" and len(found.data[0][0][0]) == 1 and bool(found.exponentials)

    # Functions.

    def exp(self, value: Value) -> Value | None:
        """Return the exponential of scores, a tensor of its own.

        What is the logarithm of a row's sum is taken out: ``exp(s - log l)`` is ``exp(s) / l``.
        """
        rest: dict[Monomial, float] = {}
        powers: dict[Factor, int] = {}
        for monomial, number in value.terms.items():
            taken = self._logarithm(monomial)
            if taken is None or number != round(number):
                rest[monomial] = number
                continue
            for factor, power in taken:
                powers[factor] = powers.get(factor, 0) + power * round(number)
        order = tuple(a for a in value.axes if any(a in f.axes for m in rest for f, _ in m))
        if len(order) < 2:
            return None
        number = {axis: i for i, axis in enumerate(order)}
        form, masks = self._numbered(rest, number), self._masks_of(rest, number)
        base = self._base("exp", _sizes(order), form, None, masks)
        exponential = Factor(base, tuple((a,) for a in order))
        powers[exponential] = powers.get(exponential, 0) + 1
        return Value(value.places, {frozenset((f, p) for f, p in powers.items() if p): 1.0})

    def _masks_of(
        self, terms: Mapping[Monomial, float], number: Mapping[Axis, int]
    ) -> tuple[Factor, ...]:
        """Return the masks of scores in some terms, with numbers for axes."""
        return tuple(
            _counted(placed(mask, f.places), number)
            for m in terms
            for f, _ in m
            for mask in self.bases[f.base].masks
        )

    def log(self, value: Value) -> Value | None:
        """Return the logarithm of a monomial of rows' sums, a tensor of its own."""
        if len(value.terms) != 1:
            return None
        ((monomial, number),) = value.terms.items()
        if number != 1 or not monomial or not self.exponentials(value):
            return None
        used = [a for a in value.axes if any(a in f.axes for f, _ in monomial)]
        terms = {monomial: 1.0}
        form = self._numbered(terms, {axis: i for i, axis in enumerate(used)})
        base = self._base("log", _sizes(used), form, self.exponentials(value))
        return single(base, tuple((a,) for a in used), value.places)

    def _logarithm(self, monomial: Monomial) -> list[tuple[Factor, int]] | None:
        """Return what a monomial is the logarithm of, along the axes here."""
        if len(monomial) != 1:
            return None
        ((factor, power),) = monomial
        base = self.bases[factor.base]
        if base.kind != "log" or power != 1:
            return None
        ((inside, _),) = base.data
        return [(placed(f, factor.places), p) for f, p in inside]

    def masked(self, scores: Value, mask: Value, number: float, sign: bool) -> Value | None:
        """Return scores that are `number` where a mask is not (`sign`), as a tensor of its own."""
        aligned = align(scores, mask)
        if aligned is None:
            return None
        scores, mask = aligned
        leaf = self._leaf(mask)
        if leaf is None:
            return None
        axes = scores.axes
        position = {axis: i for i, axis in enumerate(axes)}
        form, inside = self._numbered(scores.terms, position), _counted(leaf, position)
        side = Factor(self._sided(leaf.base, sign), inside.places)
        data = (form, side, number, sign, inside)
        masks = (side, *self._masks_of(scores.terms, position))
        made = self._base("masked", _sizes(axes), data, masks=masks)
        return single(made, tuple((a,) for a in axes), scores.places)

    def _sided(self, base: int, sign: bool) -> int:
        """Return a mask, or the tensor that stands for its negation."""
        return base if sign else self._base("leaf", self.bases[base].sizes, ("not", base))

    def side(self, mask: Value, sign: bool) -> Value | None:
        """Return a mask as a tensor that is one where it holds (`sign`), or where it does not."""
        leaf = self._leaf(mask)
        return leaf and single(self._sided(leaf.base, sign), leaf.places, mask.places)

    def _leaf(self, value: Value) -> Factor | None:
        """Return the one array of the program that a value is a multiple of, if it is."""
        found = value.single
        return found[0] if found and self.bases[found[0].base].kind == "leaf" else None

    def sum(self, value: Value, over: Iterable[Axis]) -> Value | None:
        """Return a sum over axes; ``None`` where it is no formal sum either."""
        over = frozenset(over)
        places = tuple(tuple(a for a in p if a not in over) for p in value.places)
        total = Value(places, {})
        for monomial, number in value.terms.items():
            term = self._sum_of(monomial, over)
            added = term and self.add(total, Value(places, {term[0]: term[1] * number}))
            if added is None:
                return None
            total = added
        return total

    def _sum_of(self, monomial: Monomial, over: frozenset[Axis]) -> tuple[Monomial, float] | None:
        """Return the sum of one monomial, as a monomial and a number."""
        inside = [(f, p) for f, p in monomial if f.axes & over]
        outside = frozenset(monomial) - frozenset(inside)
        met = frozenset().union(*(f.axes for f, _ in inside))
        times = math.prod(a.size for a in over - met)
        if not inside:
            return outside, float(times)
        made = self._contract(inside, over & met)
        if made is None:
            return None
        return self._unmasked(_times(outside, made)), float(times)

    def _contract(
        self, factors: list[tuple[Factor, int]], over: frozenset[Axis]
    ) -> Monomial | None:
        """Return the formal sum of some factors over axes which each of them extends along."""
        tainted = [(f, p) for f, p in factors if self.bases[f.base].exponentials]
        if not tainted:
            if len(factors) != 2 or any(p != 1 for _, p in factors):
                return None
            return frozenset([(self._formal(factors, over), 1)])
        scores = [(f, p) for f, p in tainted if self.bases[f.base].kind == "exp"]
        if not scores:
            return self._inwards(factors, over)
        if len(scores) != 1 or scores[0][1] != 1 or not over <= scores[0][0].axes:
            return None
        return frozenset([(self._formal(factors, over), 1)])

    def _inwards(self, factors: list[tuple[Factor, int]], over: frozenset[Axis]) -> Monomial | None:
        """Return ``Σ_h g·Σ_s e·v`` as ``Σ_s e·Σ_h g·v``, and ``Σ_n Σ_s e·v`` as one sum."""
        if (
            len(factors) == 1
            and factors[0][1] == 1
            and self.bases[factors[0][0].base].kind == "sum"
        ):
            opened, summed = self.open(factors[0][0])
            return self._contract(opened, over | summed)
        if len(factors) != 2 or any(p != 1 for _, p in factors):
            return None
        sums = [f for f, _ in factors if self.bases[f.base].exponentials]
        if len(sums) != 1 or self.bases[sums[0].base].kind != "sum":
            return None
        (other,) = [f for f, _ in factors if f is not sums[0]]
        opened, summed = self.open(sums[0])
        scores = [f for f, p in opened if self.bases[f.base].kind == "exp" and p == 1]
        values = [f for f, p in opened if not self.bases[f.base].exponentials and p == 1]
        if len(opened) != 2 or len(scores) != 1 or len(values) != 1 or over & scores[0].axes:
            return None
        if not (other.axes | values[0].axes) - over <= scores[0].axes | summed:
            return None
        product = self._contract([(other, 1), (values[0], 1)], over & values[0].axes & other.axes)
        if product is None or not over <= values[0].axes & other.axes:
            return None
        return self._contract([(scores[0], 1), *product], summed)

    def open(self, factor: Factor) -> tuple[list[tuple[Factor, int]], frozenset[Axis]]:
        """Return what a formal sum adds up, along the axes here, and the axes of the sum."""
        base = self.bases[factor.base]
        ((terms, _),), inner = base.data
        summed = tuple(Axis(size) for size in inner)
        places = (*factor.places, *((a,) for a in summed))
        return [(placed(f, places), p) for f, p in terms], frozenset(summed)

    def _formal(self, factors: Sequence[tuple[Factor, int]], over: frozenset[Axis]) -> Factor:
        """Return a sum as a tensor; its axes are in an order that the factors give."""
        position: dict[Axis, int] = {}
        for f, _ in sorted(factors, key=lambda fp: (fp[0].base, fp[1])):
            for axis in itertools.chain.from_iterable(f.places):
                position.setdefault(axis, len(position))
        free = [a for a in position if a not in over]
        bound = [a for a in position if a in over]
        number = {axis: i for i, axis in enumerate((*free, *bound))}
        terms = {frozenset(factors): 1.0}
        data = (self._numbered(terms, number), _sizes(bound))
        exponentials = frozenset().union(*(self.bases[f.base].exponentials for f, _ in factors))
        before = len(self.bases)
        base = self._base("sum", _sizes(free), data, exponentials)
        if base == before:
            for exponential in exponentials:
                self.sums.setdefault(exponential, []).append(base)
        return Factor(base, tuple((a,) for a in free))

    def _base(
        self,
        kind: str,
        sizes: tuple[int, ...],
        data: Any,
        exponentials: frozenset[int] | None = frozenset(),
        masks: tuple[Factor, ...] = (),
    ) -> int:
        """Return the number of the tensor that is made so; `None` for itself as an exponential."""
        found = self._numbers.get((kind, data))
        if found is None:
            found = self._numbers[kind, data] = len(self.bases)
            own = frozenset([found]) if exponentials is None else exponentials
            self.bases.append(Base(kind, sizes, data, own, masks))
        return found

    def _numbered(
        self, terms: Mapping[Monomial, float], number: Mapping[Axis, int]
    ) -> tuple[tuple[tuple[tuple[Factor, int], ...], float], ...]:
        """Return terms with numbers for axes, in an order of their own."""
        renamed = []
        for monomial, coefficient in terms.items():
            factors = sorted((_counted(f, number), power) for f, power in monomial)
            renamed.append((tuple(factors), float(f"{coefficient:.9g}")))
        return tuple(sorted(renamed))

    # Comparison.

    def normal_form(self, value: Value) -> tuple[Any, list[Place], float]:
        """Return a key that equal values share whatever their axes are, those axes, and a factor.

        Values of one key are multiples of each other: each is its factor times the same. Axes that
        are one place of all tensors are one, as what a reshape has made of it.
        """
        position: dict[Axis, int] = {}
        wholes = {place[0]: place for place in _wholes(value)}
        inner = (axis for place in wholes.values() for axis in place[1:])

        def order(item: tuple[Monomial, float]) -> Any:
            return sorted((f.base, p) for f, p in item[0]), item[1]

        items = sorted(substituted(value, dict.fromkeys(inner, ())).terms.items(), key=order)
        first = items[0][1] if items else 1.0
        for monomial, _ in items:
            for f, _p in sorted(monomial, key=lambda fp: (fp[0].base, fp[1])):
                for axis in itertools.chain.from_iterable(f.places):
                    position.setdefault(axis, len(position))
        scaled = {m: n / first for m, n in items}
        form = tuple((m, float(f"{n:.5g}")) for m, n in self._numbered(scaled, position))
        return form, [wholes.get(axis, (axis,)) for axis in position], first


def _wholes(value: Value) -> list[Place]:
    """Return places of several axes each, along which every tensor extends as a whole or not."""
    places = {p for f in value.factors for p in f.places}
    held = Counter(itertools.chain.from_iterable(places))
    return [p for p in places if len(p) > 1 and all(held[axis] == 1 for axis in p)]


def _sizes(axes: Iterable[Axis]) -> tuple[int, ...]:
    return tuple(a.size for a in axes)


def _times(first: Monomial, second: Monomial) -> Monomial:
    powers = dict(first)
    for factor, power in second:
        powers[factor] = powers.get(factor, 0) + power
    return frozenset((f, p) for f, p in powers.items() if p)


def placed(factor: Factor, places: Sequence[Place] | Mapping[int, Place]) -> Factor:
    """Return a factor whose axes are numbers of places, along the axes of those."""
    inside = tuple(tuple(a for i in p for a in places[i]) for p in factor.places)  # type: ignore[call-overload,index]
    return Factor(factor.base, inside)


def _counted(factor: Factor, number: Mapping[Axis, int]) -> Factor:
    """Return a factor with numbers for its axes."""
    return Factor(factor.base, tuple(tuple(number[a] for a in p) for p in factor.places))  # type: ignore[misc]
