"""Find attentions among the values of a level: forward, and backward as JAX derives it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxamp.found.algebra import placed
from jaxamp.found.attention.scores import Scores
from jaxamp.found.values import Axis, Factor, Place, Value, divided, refine, single
from jaxamp.jaxprs.name_stack import is_transposed


class Bias(NamedTuple):
    """Numbers added to the scores: an array times a number."""

    factor: Factor
    number: float


class Masking(NamedTuple):
    """Scores replaced by a number where a mask is not as it says."""

    factor: Factor
    number: float
    sign: bool


Step = Bias | Masking


class Held(NamedTuple):
    """A value of the program that is a multiple of a result of attention."""

    value: int
    places: tuple[Place, ...]  # along axes of the attention
    times: float
    parts: Mapping[Axis, Place]  # what some of those are of, as rows and columns of words


@dataclass(slots=True, eq=False)
class Found:
    """An attention: the numbers of its tensors, and what is along the axes of its scores."""

    exponential: int  # of scores
    product: int  # of queries and keys
    axes: tuple[Axis, ...]
    keys: tuple[Axis, ...]  # the axes that weights sum up to one over
    q: Factor
    k: Factor
    v: Factor
    scale: float  # multiplies the product, before the steps
    steps: list[Step]
    is_shifted: bool  # whether a number of each row is subtracted, such as its maximum
    dout: Factor | None = None
    results: dict[str, list[Held]] = field(default_factory=dict)

    @property
    def operands(self) -> list[Factor]:
        """Queries, keys, values, and the cotangent of the output if it is read."""
        return [self.q, self.k, self.v, *([self.dout] if self.dout else [])]

    @property
    def biases(self) -> list[Bias]:
        """The arrays that are added to scores, each times a number."""
        return [step for step in self.steps if isinstance(step, Bias)]

    @property
    def backward(self) -> bool:
        """Return whether there is a backward pass."""
        return any(name != "out" for name in self.results)

    @property
    def alone(self) -> frozenset[Axis]:
        """Axes of the scores that queries have and keys have not."""
        return (self.q.axes - self.k.axes) & frozenset(self.axes)

    @property
    def shared(self) -> tuple[Axis, ...]:
        """Axes of the scores that are neither of queries alone nor of keys alone."""
        return tuple(a for a in self.axes if a not in self.alone and a not in self.keys)


NO_PRODUCT = "scores are not a product of queries and keys times a number"
_SEVERAL_AXES = "weights are normalized over several axes"
_CHANGED = "weights are changed before they multiply the values"
_MIXED = "weights are mixed over keys before they multiply the values"
_TWO_PRODUCTS = "scores are a sum of two products"


class Scaled(NamedTuple):
    """Scores as they are computed: products of queries and keys, scaled, and then the steps."""

    product: Factor
    scale: float
    steps: list[Step]


@dataclass(slots=True)
class Matcher:
    """Search for attentions in one level."""

    scores: Scores
    index: dict[Any, list[tuple[int, Value, list[Place], float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        algebra = self.scores.algebra
        for value, forms in self.scores.forms.items():
            if algebra.exponentials(forms.whole):
                key, axes, times = algebra.normal_form(forms.whole)
                self.index.setdefault(key, []).append((value, forms.whole, axes, times))

    def candidates(self) -> list[int]:
        """Return exponentials of scores that are summed by a product, in program order."""
        found: dict[int, None] = {}
        for _, exponentials in self.scores.summed:
            found.update(dict.fromkeys(sorted(exponentials)))
        return [e for e in found if e in self.scores.exponentials and self._sums(e, 1)]

    def find(self, exponential: int) -> Found | str | None:
        """Return the attention of an exponential of scores, or why there is none.

        ``None`` for the softmax of a loss, which is no attention in the first place.
        """
        algebra = self.scores.algebra
        base = algebra.bases[exponential]
        axes = tuple(Axis(n) for n in base.sizes)
        keys = self._keys(exponential, axes)
        if keys is None:
            return _SEVERAL_AXES
        places = [(a,) for a in axes]
        resolved = self._resolve(base.data, places, frozenset(keys))
        if isinstance(resolved, str):
            return None if self._is_read_backward_alone(exponential) else resolved
        product, scale, steps = resolved
        operands = self._operands(product, frozenset(keys))
        if operands is None:
            return NO_PRODUCT
        q, k = operands
        shifted = any(
            f.axes and not f.axes & frozenset(keys)
            for monomial, _ in base.data
            for f in (placed(f, places) for f, _ in monomial)
        )
        found = Found(exponential, product.base, axes, keys, q, k, k, scale, steps, shifted)
        for value in self._values(found):
            found.v = value
            found.results = self._results(found)
            if found.results:
                is_mixed = found.shared and not found.v.axes & frozenset(found.shared)
                return _MIXED if is_mixed else found
        return None if self._is_of_a_loss(found) else _CHANGED

    def _is_read_backward_alone(self, exponential: int) -> bool:
        """Return whether no product of the forward pass reads weights: those are of a loss."""
        units = [unit for unit, summed in self.scores.summed if exponential in summed]
        return all(is_transposed(unit.scope) for unit in units)

    def _is_of_a_loss(self, found: Found) -> bool:
        """Return whether products read weights less something, and multiply it by q or k again.

        Such is the cotangent of the logits of a cross entropy.
        """
        own = {found.q.base, found.k.base}
        for unit, exponentials in self.scores.summed:
            if found.exponential not in exponentials:
                continue
            operands = [self.scores.of(atom) for atom in unit.ins[:2]]
            for less, other in (operands, operands[::-1]):
                has = [found.exponential in {f.base for f, _ in m} for m in less.whole.terms]
                single = other.single.single
                if any(has) and (all(has) or single is None or single[0].base not in own):
                    return False
        return True

    def _sums(self, exponential: int, count: int) -> list[int]:
        """Return formal sums of an exponential times so many less one other tensors.

        Sums in which one of its axes is two, as rows and columns of pixels, are left out.
        """
        algebra = self.scores.algebra
        found = []
        for base in algebra.sums.get(exponential, ()):
            ((terms, _),), _bound = algebra.bases[base].data
            own = [(f, p) for f, p in terms if f.base == exponential]
            is_whole = all(len(place) == 1 for f, _ in own for place in f.places)
            if len(terms) == count and is_whole and [p for _, p in own] == [1]:
                found.append(base)
        return found

    def _keys(self, exponential: int, axes: tuple[Axis, ...]) -> tuple[Axis, ...] | None:
        """Return the axes that exponentials are summed over, if these are always the same."""
        sets = {self._bound(base, exponential) for base in self._sums(exponential, 1)}
        if len(sets) != 1:
            return None
        (bound,) = sets
        return tuple(axes[i] for i in sorted(bound))

    def _bound(self, base: int, exponential: int) -> frozenset[int]:
        """Return the axes of an exponential that a formal sum adds up."""
        ((terms, _),), _ = self.scores.algebra.bases[base].data
        free = len(self.scores.algebra.bases[base].sizes)
        (factor,) = (f for f, _ in terms if f.base == exponential)
        return frozenset(i for i, (n,) in enumerate(factor.places) if n >= free)

    def _resolve(self, form: Any, places: Sequence[Place], keys: frozenset[Axis]) -> Scaled | str:
        """Return how scores are made of a product of queries and keys."""
        product: Factor | None = None
        scale, steps = 1.0, list[Step]()
        biases: list[Bias] = []
        products: list[Bias] = []
        algebra = self.scores.algebra
        for monomial, number in form:
            factors = [placed(f, places) for f, p in monomial if p == 1]
            if not monomial:
                continue  # the same number in every place
            if len(factors) != 1 or len(monomial) != 1:
                return NO_PRODUCT
            (factor,) = factors
            kind = algebra.bases[factor.base].kind
            if kind == "masked" and product is None:
                inner, _, low, sign, mask = algebra.bases[factor.base].data
                within = self._resolve(inner, factor.places, keys)
                if isinstance(within, str):
                    return within
                product, scale = within.product, within.scale * number
                masking = Masking(placed(mask, factor.places), low, sign)
                steps = [s._replace(number=s.number * number) for s in (*within.steps, masking)]
            elif kind == "sum" and factor.axes & keys and factor.axes - keys:
                products.append(Bias(factor, number))
            elif factor.axes & keys:
                biases.append(Bias(factor, number))
        if product is None and products:
            product, scale = min(products, key=lambda p: self._size_of_operands(p.factor))
        others = [p for p in products if p.factor is not product]
        if product is None:
            return NO_PRODUCT
        if not all(self._is_of_pairs(other.factor, product, keys) for other in others):
            return _TWO_PRODUCTS
        return Scaled(product, scale, [*steps, *biases, *others])

    def _size_of_operands(self, product: Factor) -> int:
        opened, _ = self.scores.algebra.open(product)
        return sum(math.prod(self.scores.algebra.bases[f.base].sizes) for f, _ in opened)

    def _is_of_pairs(self, other: Factor, product: Factor, keys: frozenset[Axis]) -> bool:
        """Return whether a product is of an array over queries and keys, and so is a bias.

        Such are features of pairs of words times weights, and queries times places of keys that
        each query has of its own.
        """
        operands = self._operands(product, keys)
        if operands is None:
            return False
        q, k = operands
        opened, _ = self.scores.algebra.open(other)
        return any((q.axes - k.axes) & product.axes | keys <= f.axes for f, _ in opened)

    def _operands(self, product: Factor, keys: frozenset[Axis]) -> tuple[Factor, Factor] | None:
        opened, summed = self.scores.algebra.open(product)
        factors = [f for f, _ in opened]
        with_keys = [f for f in factors if f.axes & keys]
        without = [f for f in factors if not f.axes & keys]
        if len(with_keys) != 1 or len(without) != 1 or not keys <= with_keys[0].axes:
            return None
        if not summed <= without[0].axes & with_keys[0].axes:
            return None
        return without[0], with_keys[0]

    def _values(self, found: Found) -> Iterator[Factor]:
        """Yield what the weights may be multiplied by."""
        partners = [*self._partners(found)]
        for other in partners:
            is_value = other.axes & frozenset(found.keys) and not other.axes & found.alone
            if is_value and self._lookup_out(found, other):
                yield other
        for other in partners:
            yield from (v for v, _ in self._split(found, other))

    def _partners(self, found: Found) -> Iterator[Factor]:
        """Yield the other factors of sums over keys, along the axes of an attention."""
        algebra = self.scores.algebra
        for base in self._sums(found.exponential, 2):
            ((terms, _),), summed = algebra.bases[base].data
            (own,) = (f for f, _ in terms if f.base == found.exponential)
            others = [f for f, p in terms if f.base != found.exponential and p == 1]
            if self._bound(base, found.exponential) != {found.axes.index(a) for a in found.keys}:
                continue
            places: Any = {n: (found.axes[i],) for i, (n,) in enumerate(own.places)}
            for n, size in enumerate((*algebra.bases[base].sizes, *summed)):
                places.setdefault(n, (Axis(size),))
            yield from (placed(f, places) for f in others)

    def _split(self, found: Found, product: Factor) -> Iterator[tuple[Factor, Factor]]:
        """Yield values and cotangents of outputs whose product may be that of weights."""
        algebra = self.scores.algebra
        if algebra.bases[product.base].kind != "sum" or algebra.bases[product.base].exponentials:
            return
        opened, summed = algebra.open(product)
        keys = frozenset(found.keys)
        first, second = (f for f, _ in opened)
        for value, cotangent in ((first, second), (second, first)):
            if not keys <= value.axes or value.axes & found.alone or cotangent.axes & keys:
                continue
            if summed <= value.axes & cotangent.axes:
                yield value, cotangent

    def _lookup_out(self, found: Found, value: Factor) -> list[Held]:
        keys = found.keys
        axes = _union(found.axes, value)
        weights = self._weights(found, axes)
        out = weights and self._contracted(weights, value, keys, axes)
        return [] if out is None else self._holders(out)

    def _weights(self, found: Found, axes: Sequence[Axis]) -> Value | None:
        algebra = self.scores.algebra
        places = (tuple(axes),)
        exponential = single(found.exponential, [(a,) for a in found.axes], places)
        total = algebra.sum(exponential, found.keys)
        return total and algebra.divide(exponential, Value(places, total.terms))

    def _contracted(
        self, value: Value, other: Factor, over: Iterable[Axis], axes: Sequence[Axis]
    ) -> Value | None:
        places = (tuple(axes),)
        factor = single(*other, places)
        product = self.scores.algebra.multiply(Value(places, value.terms), factor)
        total = product and self.scores.algebra.sum(product, over)
        return total and Value(places, total.terms)

    def _results(self, found: Found) -> dict[str, list[Held]]:
        """Return the values of the program that hold results of an attention."""
        results = {"out": self._lookup_out(found, found.v)}
        for product in self._partners(found):
            for value, cotangent in self._split(found, product):
                if value.base == found.v.base:
                    backward = self._backward(found, product, value, cotangent)
                    if any(backward.values()):
                        found.v, found.dout = value, cotangent
                        results = {"out": self._lookup_out(found, value), **backward}
        return {name: held for name, held in results.items() if held}

    def _backward(
        self, found: Found, product: Factor, value: Factor, cotangent: Factor
    ) -> dict[str, list[Held]]:
        algebra = self.scores.algebra
        axes = _union(found.axes, product, value, cotangent, found.q, found.k)
        places = (tuple(axes),)
        weights = self._weights(found, axes)
        along = weights and algebra.multiply(weights, single(*product, places))
        row = along and algebra.sum(along, found.keys)
        back = row and weights and algebra.multiply(weights, Value(places, row.terms))
        dscores = back and along and algebra.add(along, back, -1.0)
        if not dscores or not weights:
            return {}
        scores_axes = frozenset(found.axes)
        dq = self._contracted(dscores, found.k, scores_axes - found.q.axes, axes)
        dk = self._contracted(dscores, found.q, scores_axes - found.k.axes, axes)
        dv = self._contracted(weights, cotangent, scores_axes - value.axes, axes)
        named = {"dq": dq, "dk": dk, "dv": dv}
        for i, bias in enumerate(found.biases):
            named[f"dbias{i}"] = algebra.sum(dscores, scores_axes - bias.factor.axes)
        return {name: self._holders(x) if x else [] for name, x in named.items()}

    def _holders(self, wanted: Value) -> list[Held]:
        key, axes, times = self.scores.algebra.normal_form(wanted)
        found = []
        for value, has, own, number in self.index.get(key, ()):
            pairs = [refine(*pair) for pair in zip(axes, own, strict=True)]
            parts = {axis: place for refined in pairs for axis, place in (refined or {}).items()}
            if all(a in parts for a in has.axes):
                held = Held(value, divided(has.places, parts), number / times, parts)
                found.append(held)
        return found


def _union(axes: Iterable[Axis], *factors: Factor) -> tuple[Axis, ...]:
    every = dict.fromkeys(axes)
    for factor in factors:
        every.update(dict.fromkeys(a for place in factor.places for a in place))
    return tuple(every)
