"""Values of a program in the algebra of attention: a rule for each primitive."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxamp.found.algebra import Algebra
from jaxamp.found.levels import Atom, Level, Unit, numbers
from jaxamp.found.values import (
    Factor,
    Place,
    Value,
    align,
    fresh_places,
    merging,
    refine,
    renamed,
    reshaped,
    single,
    size_of,
    substituted,
)
from jaxamp.jaxprs.known_arrays import KnownArrays, one_number

LEAST = -1e4  # stand-ins for minus infinity are at least as low
_SMALL = 1 << 10


class Forms(NamedTuple):
    """A value as a sum of tensors, and as a single one."""

    whole: Value
    single: Value


class Scores:
    """The values of a level in the algebra."""

    def __init__(self, level: Level, known: KnownArrays) -> None:
        self.level, self.known = level, known
        self.algebra = Algebra()
        self.forms: dict[int, Forms] = {}  # per value that is more than a leaf, what it is
        # Per tensor that is a product of arrays, the value that holds it, and its form.
        self.homes: dict[int, tuple[int, Value]] = {}
        self.summed: list[tuple[Unit, frozenset[int]]] = []  # products with exponentials of scores
        self.exponentials: dict[int, list[int]] = {}  # the values that hold each, of scores
        self.masked_again: set[int] = set()  # made of weights that are masked after the softmax
        self.merged: dict[Any, int] = {}  # the first of equal arrays that merge axes of a tensor
        self.scored: set[int] = set()  # values that products are in
        for unit in level.equations:
            is_product = unit.eqn.primitive.name == "dot_general"
            if is_product or not self.scored.isdisjoint(numbers(unit.ins)):
                self.scored.update(numbers(unit.outs))
            rule = _RULES.get(unit.eqn.primitive.name)
            if rule is not None and isinstance(unit.outs[0], int):
                self.algebra.masks_again = False
                self._record(unit.outs[0], rule(self, unit))
                if self.algebra.masks_again or not self.masked_again.isdisjoint(numbers(unit.ins)):
                    self.masked_again.add(unit.outs[0])

    def of(self, atom: Atom) -> Forms:
        """Return the forms of a value."""
        found = self.forms.get(atom) if isinstance(atom, int) else None
        if found is None:
            leaf = self.leaf(atom)
            found = Forms(leaf, leaf)
            if isinstance(atom, int):
                self.forms[atom] = found
        return found

    def leaf(self, atom: Atom) -> Value:
        """Return a value of which nothing is known, unless it is a number."""
        is_literal = isinstance(atom, Literal)
        shape = getattr(atom.aval if is_literal else self.level.avals[atom], "shape", ())
        if (number := self.known.number(atom)) is not None:
            return self.algebra.constant(number, shape)
        return self.algebra.leaf(("literal", id(atom)) if is_literal else atom, shape)

    def _record(self, out: int, found: Value | Forms | None) -> None:
        if isinstance(found, Value):
            is_one = self.is_tainted(found) or found.single or found.number is not None
            found = Forms(found, found if is_one else self.leaf(out))
        if found is not None:
            self.forms[out] = found

    # What the rules ask.

    def is_tainted(self, value: Value) -> bool:
        """Return whether exponentials of scores are in it."""
        return bool(self.algebra.exponentials(value))

    def has_product(self, value: Value) -> bool:
        """Return whether it may be scores: a product of arrays is in it."""
        bases = [self.algebra.bases[f.base] for f in value.factors]
        return any(b.kind in ("sum", "masked") and not b.exponentials for b in bases)

    def term(self, forms: Forms) -> Value:
        """Return an operand of a sum: as a sum where that is scores or weights."""
        whole = forms.whole
        if whole.number is not None or self.is_tainted(whole) or self.has_product(whole):
            return whole
        return forms.single

    def is_closed(self, value: Value) -> bool:
        """Return whether exponentials of scores are in it as sums over them alone."""
        bases = [self.algebra.bases[f.base] for f in value.factors]
        return self.is_tainted(value) and all(b.kind not in ("exp", "log") for b in bases)

    def is_output(self, value: Value) -> bool:
        """Return whether it is a multiple of what an attention returns, or of sums with that."""
        bases, is_weight = self.algebra.bases, self.algebra.is_weight
        tainted = (f.base for f in value.factors if bases[f.base].exponentials)
        return self.is_closed(value) and not all(map(is_weight, tainted))

    def factor(self, forms: Forms) -> Value:
        """Return an operand of a product: a single tensor, unless exponentials are in it."""
        return forms.whole if self.is_tainted(forms.whole) else forms.single

    def number(self, atom: Atom) -> float | None:
        """Return the number that a small known array is in every place, as masks of heads are."""
        value = self.of(atom).whole
        shape = [size_of(place) for place in value.places]
        if value.number is not None or math.prod(shape) > _SMALL or atom not in self.known:
            return value.number
        return one_number(np.unique(self.known.thin(atom)))

    def numbers(self, factor: Factor) -> np.ndarray | None:
        """Return the numbers of a known array, without axes of size one; ``None`` for others."""
        base = self.algebra.bases[factor.base]
        if base.kind != "leaf" or not isinstance(base.data, int) or base.data not in self.known:
            return None
        return np.squeeze(self.known.whole(base.data))

    def is_mask(self, factor: Factor) -> bool:
        """Return whether an array is boolean, or known to be zeros and ones."""
        value = self.algebra.bases[factor.base].data
        if isinstance(value, int) and getattr(self.level.avals[value], "dtype", None) == np.bool_:
            return True
        numbers = self.numbers(factor)
        return numbers is not None and bool(np.isin(numbers, (0, 1)).all())

    def weights_masked_again(self, exponential: int) -> set[bool]:
        """Return whether products read weights that are masked after the softmax, too, or not."""
        is_weight, found = self.algebra.is_weight, set[bool]()
        for unit, exponentials in self.summed:
            for atom in numbers(unit.ins) if exponential in exponentials else ():
                bases = [f.base for f in self.of(atom).whole.factors]
                if exponential in bases and all(map(is_weight, bases)):
                    found.add(atom in self.masked_again)
        return found

    def home(self, factor: Factor) -> int | None:
        """Return the value of the program that holds a tensor."""
        base = self.algebra.bases[factor.base]
        if base.kind == "leaf":
            return base.data if isinstance(base.data, int) else None
        return self.homes[factor.base][0] if factor.base in self.homes else None


def _sign(number: float) -> Callable[[Scores, Unit], Value | None]:
    def rule(scores: Scores, unit: Unit) -> Value | None:
        first, second = (scores.term(scores.of(a)) for a in unit.ins)
        masked = _masked_sum(scores, first, second, number)
        if masked is None and number == 1:
            masked = _masked_sum(scores, second, first, 1.0)
        if masked is not None:
            return masked
        of_rows = all(scores.is_closed(v) or v.number is not None for v in (first, second))
        if not of_rows and not any(_is_worth_adding(scores, v) for v in (first, second)):
            return None
        return scores.algebra.add(first, second, number)

    return rule


def _masked_sum(scores: Scores, scored: Value, added: Value, sign: float) -> Value | None:
    """Return ``s * m + sign * added`` as masked scores, if it is low just where the mask is zero.

    Such is ``s * m - 1e10 * (1 - m)`` for a known mask of zeros and ones.
    """
    if not scores.has_product(scored) or any(len(monomial) < 2 for monomial in scored.terms):
        return None
    aligned = align(scored, added)
    given = aligned and aligned[1].single
    if not aligned or not given or (numbers := scores.numbers(given[0])) is None:
        return None
    scored, _ = aligned
    for mask, power in frozenset.intersection(*scored.terms):
        ones = scores.numbers(mask)
        is_mask = ones is not None and power == 1 and scores.is_mask(mask)
        if not is_mask or _along(mask) != _along(given[0]):
            continue
        low = np.unique(numbers[ones == 0]) * given[1] * sign
        if len(low) == 1 and low[0] <= LEAST and not numbers[ones == 1].any():
            rest = {m - {(mask, power)}: n for m, n in scored.terms.items()}
            holds = single(mask.base, mask.places, scored.places)
            return scores.algebra.masked(Value(scored.places, rest), holds, float(low[0]), True)
    return None


def _along(factor: Factor) -> list[Place]:
    """Return the axes that a tensor extends along; one of size one is none."""
    return [place for place in factor.places if place]


def _is_worth_adding(scores: Scores, value: Value) -> bool:
    """Return whether a sum with it may be scores, or weights or their cotangents."""
    return scores.has_product(value) or (scores.is_tainted(value) and not scores.is_closed(value))


def _neg(scores: Scores, unit: Unit) -> Forms:
    return _scaled(scores, scores.of(unit.ins[0]), -1.0)


def _scaled(scores: Scores, forms: Forms, number: float) -> Forms:
    return Forms(*(scores.algebra.scale(v, number) for v in forms))


def _mul(scores: Scores, unit: Unit) -> Forms | Value | None:
    return _times(scores, unit, [scores.of(a) for a in unit.ins])


def _div(scores: Scores, unit: Unit) -> Forms | Value | None:
    first, second = (scores.of(a) for a in unit.ins)
    inverse = scores.algebra.power(scores.factor(second), -1)
    return inverse and _times(scores, unit, [first, Forms(inverse, inverse)])


def _times(scores: Scores, unit: Unit, pair: Sequence[Forms]) -> Forms | Value | None:
    for number, other in ((pair[0], pair[1]), (pair[1], pair[0])):
        value = number.whole.number
        if value is not None and math.isfinite(value):
            return _spread(unit, _scaled(scores, other, value))
    if any(scores.is_tainted(forms.whole) for forms in pair):
        return scores.algebra.multiply(*map(scores.factor, pair))
    for mask, scored in (pair, pair[::-1]):
        own = mask.single.single
        if own and scores.has_product(scored.whole) and scores.is_mask(own[0]):
            masked = scores.algebra.multiply(scored.whole, mask.single)
            return masked and Forms(masked, masked)
    return None


def _spread(unit: Unit, forms: Forms) -> Forms | None:
    """Return forms if they have the rank of the result."""
    rank = len(unit.eqn.outvars[0].aval.shape)  # type: ignore[attr-defined]
    return forms if len(forms.whole.places) == rank else None


def _power(scores: Scores, unit: Unit) -> Value | None:
    value = scores.of(unit.ins[0]).whole
    if value.number is not None or scores.is_tainted(value):
        return scores.algebra.power(value, unit.eqn.params.get("y", 2))
    return None


def _exp(scores: Scores, unit: Unit, scale: float = 1.0) -> Value | None:
    whole = scores.of(unit.ins[0]).whole
    if scores.scored.isdisjoint(numbers(unit.ins)):
        return None
    found = scores.algebra.exp(scores.algebra.scale(whole, scale))
    for exponential in scores.algebra.exponentials(found) if found else ():
        scores.exponentials.setdefault(exponential, []).append(unit.outs[0])  # type: ignore[arg-type]
    return found


def _log(scores: Scores, unit: Unit) -> Value | None:
    return scores.algebra.log(scores.of(unit.ins[0]).whole)


def _abs(scores: Scores, unit: Unit) -> Value | None:
    value = scores.of(unit.ins[0]).whole
    return value if _is_positive(scores, value) else None


def _is_positive(scores: Scores, value: Value) -> bool:
    """Return whether it is a product of exponentials and sums of them alone."""
    is_weight = scores.algebra.is_weight
    return len(value.terms) == 1 and all(
        number > 0 and bool(monomial) and all(is_weight(f.base) for f, _ in monomial)
        for monomial, number in value.terms.items()
    )


def _compare(decided: Callable[[float, float], bool]) -> Callable[[Scores, Unit], Value | None]:
    """Return the rule of a comparison, which is decided for a positive number and zero."""

    def rule(scores: Scores, unit: Unit) -> Value | None:
        first, second = (scores.of(a).whole for a in unit.ins)
        shape = unit.eqn.outvars[0].aval.shape  # type: ignore[attr-defined]
        if second.number == 0 and _is_positive(scores, first):
            scores.algebra.guarded |= scores.algebra.exponentials(first)
            return scores.algebra.constant(float(decided(1.0, 0.0)), shape)
        return None

    return rule


def _same(scores: Scores, unit: Unit) -> Forms:
    return scores.of(unit.ins[0])


def _convert(scores: Scores, unit: Unit) -> Forms | None:
    dtype = unit.eqn.params["new_dtype"]
    source = unit.eqn.invars[0].aval.dtype  # type: ignore[attr-defined]
    if jnp.issubdtype(dtype, jnp.floating) and (
        jnp.issubdtype(source, jnp.floating) or source == np.bool_
    ):
        return scores.of(unit.ins[0])
    return None


def _on_places(scores: Scores, unit: Unit, move: Callable[[Value], Value | None]) -> Forms | None:
    forms = scores.of(unit.ins[0])
    whole = move(forms.whole)
    single = whole if forms.single is forms.whole else move(forms.single)
    return Forms(whole, single) if whole and single else None


def _transpose(scores: Scores, unit: Unit) -> Forms | None:
    order = unit.eqn.params["permutation"]

    def move(value: Value) -> Value:
        return Value(tuple(value.places[i] for i in order), value.terms)

    return _on_places(scores, unit, move)


def _broadcast(scores: Scores, unit: Unit) -> Forms | None:
    shape = unit.eqn.params["shape"]
    where = unit.eqn.params["broadcast_dimensions"]

    def move(value: Value) -> Value:
        places = list(scores.algebra.constant(0.0, shape).places)
        for own, place in zip(where, value.places, strict=True):
            if place or shape[own] == 1:
                places[own] = place
        return Value(tuple(places), value.terms)

    return _on_places(scores, unit, move)


def _reshape(scores: Scores, unit: Unit) -> Forms | None:
    shape = unit.eqn.outvars[0].aval.shape  # type: ignore[attr-defined]
    if unit.eqn.params.get("dimensions") is not None:
        return None
    forms = _on_places(scores, unit, lambda value: reshaped(value, shape))
    return forms and _with_whole_axes(scores, unit, forms)


def _with_whole_axes(scores: Scores, unit: Unit, forms: Forms) -> Forms:
    """Return a tensor of its own where axes of one are merged, as rows and columns of pixels.

    Words are one axis then, in the cotangent of an output that leaves as an image, too.
    """
    out, key = unit.outs[0], merging(forms.single)
    if key is None or not isinstance(out, int) or scores.algebra.bases[key[0]].kind != "leaf":
        return forms
    leaf = scores.leaf(scores.merged.setdefault(key, out))
    return Forms(leaf if forms.whole is forms.single else forms.whole, leaf)


def _reduce_sum(scores: Scores, unit: Unit) -> Value | None:
    value = scores.of(unit.ins[0]).whole
    axes = unit.eqn.params["axes"]
    if not scores.is_tainted(value) and value.terms:
        return None
    over = [a for i in axes for a in value.places[i]]
    found = scores.algebra.sum(value, over)
    if found is None:
        return None
    places = tuple(p for i, p in enumerate(found.places) if i not in axes)
    return Value(places, found.terms)


def _dot_general(scores: Scores, unit: Unit) -> Value | Forms | None:
    if not unit.eqn.params["dimension_numbers"][0][0]:
        for index in (0, 1):
            number = scores.number(unit.ins[1 - index])
            if number is not None and math.isfinite(number):
                return _scaled(scores, _beside_number(scores, unit, index), number)
    factors = [scores.factor(scores.of(atom)) for atom in unit.ins[:2]]
    if _has_free_axes(unit):
        factors = [
            scores.leaf(a) if scores.is_output(v) else v
            for a, v in zip(unit.ins, factors, strict=True)
        ]
    return _product(scores, unit, factors)


def _has_free_axes(unit: Unit) -> bool:
    """Return whether both operands of a product have axes that the other has not."""
    contracted, batched = unit.eqn.params["dimension_numbers"]
    ranks = [len(v.aval.shape) for v in unit.eqn.invars[:2]]  # type: ignore[attr-defined]
    return all(n > len(a) + len(b) for n, a, b in zip(ranks, contracted, batched, strict=True))


def _beside_number(scores: Scores, unit: Unit, index: int) -> Forms:
    """Return an operand of a product that contracts nothing, with the axes of that."""
    own, others = (unit.eqn.params["dimension_numbers"][1][i] for i in (index, 1 - index))
    shape = unit.eqn.invars[1 - index].aval.shape  # type: ignore[attr-defined]
    more = [p for i, p in enumerate(fresh_places(shape)) if i not in others]

    def move(value: Value) -> Value:
        free = [p for i, p in enumerate(value.places) if i not in own]
        after = (*free, *more) if index == 0 else (*more, *free)
        return Value((*(value.places[i] for i in own), *after), value.terms)

    return Forms(*map(move, scores.of(unit.ins[index])))


def _product(scores: Scores, unit: Unit, operands: Sequence[Value]) -> Value | None:
    (left, right), (batch_left, batch_right) = unit.eqn.params["dimension_numbers"]
    lhs, rhs = operands
    is_tainted = scores.is_tainted(lhs) or scores.is_tainted(rhs)
    if not is_tainted and not (lhs.single and rhs.single):
        return None
    rhs = renamed(rhs)
    for i, j in zip((*left, *batch_left), (*right, *batch_right), strict=True):
        parts = refine(lhs.places[i], rhs.places[j])
        if parts is None:
            return None
        lhs, rhs = substituted(lhs, parts), substituted(rhs, parts)
    over = [a for i in left for a in lhs.places[i]]
    free_left = [p for i, p in enumerate(lhs.places) if i not in (*left, *batch_left)]
    free_right = [p for j, p in enumerate(rhs.places) if j not in (*right, *batch_right)]
    kept: list[Place] = [*(lhs.places[i] for i in batch_left), *free_left, *free_right]
    places = (*kept, tuple(over))
    product = scores.algebra.multiply(Value(places, lhs.terms), Value(places, rhs.terms))
    found = product and scores.algebra.sum(product, over)
    if is_tainted:
        exponentials = map(scores.algebra.exponentials, (lhs, rhs))
        scores.summed.append((unit, frozenset().union(*exponentials)))
    if found is None:
        return None
    found, out = Value(found.places[:-1], found.terms), unit.outs[0]
    if not is_tainted and found.single and isinstance(out, int):
        scores.homes.setdefault(found.single[0].base, (out, found))
    return found


def _select(scores: Scores, unit: Unit) -> Value | Forms | None:
    if len(unit.ins) != 3:
        return None
    pred = scores.of(unit.ins[0]).whole
    unchosen, chosen = (scores.of(a) for a in unit.ins[1:])
    if pred.number is not None:
        return chosen if pred.number else unchosen
    algebra = scores.algebra
    for kept, other, sign in ((chosen, unchosen, True), (unchosen, chosen, False)):
        number = other.whole.number
        if number is None:
            continue
        value = kept.whole
        if len(pred.places) != len(value.places):
            return None
        if number == 0 and (scores.is_tainted(value) or scores.has_product(value)):
            side = algebra.side(pred, sign)
            masked = side and algebra.multiply(value, side)
            return masked and Forms(masked, masked)
        if number <= LEAST and not scores.is_tainted(value) and scores.has_product(value):
            return algebra.masked(value, pred, number, sign)
    return None


_RULES: dict[str, Callable[[Scores, Unit], Any]] = {
    "add": _sign(1.0),
    "add_any": _sign(1.0),
    "sub": _sign(-1.0),
    "neg": _neg,
    "mul": _mul,
    "div": _div,
    "integer_pow": _power,
    "square": _power,
    "exp": _exp,
    "exp2": functools.partial(_exp, scale=math.log(2.0)),
    "log": _log,
    "abs": _abs,
    **{name: _compare(getattr(operator, name)) for name in ("gt", "ge", "lt", "le", "eq", "ne")},
    **dict.fromkeys(("copy", "name", "pvary", "reduce_precision"), _same),
    "convert_element_type": _convert,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    **dict.fromkeys(("reshape", "squeeze"), _reshape),
    "reduce_sum": _reduce_sum,
    "dot_general": _dot_general,
    "select_n": _select,
}
