"""The arithmetic of each primitive: what it does to roundings, and where results lie.

``SEMANTICS`` has a line for every primitive that is elementwise, reduces or orders; for all others
the trait in ``taxonomy.TABLE`` is enough. It lists facts of single primitives. What follows from
them for a program is in ``plan/``.

See: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, SIAM 2002, chapter 1 for
condition numbers and cancellation.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np

from jaxamp.core.intervals import (
    NONNEGATIVE,
    Interval,
    Transfer,
    added,
    anywhere,
    clamped,
    divided,
    falling,
    hull,
    itself,
    larger,
    magnitude,
    multiplied,
    negated,
    one_minus_squared,
    product_of_many,
    raised,
    remainder,
    rising,
    selected,
    smaller,
    squared,
    subtracted,
    within,
)
from jaxamp.core.taxonomy import Op, OpKind, Trait


class Linear(enum.Enum):
    """Linearity of a result in its operands."""

    NOT = "not"
    ALL = "all"  # in all of them at once: sums, and choices between them
    EACH = "each"  # in each with the others fixed: products
    FIRST = "first"  # in the first alone: quotients

    __hash__ = object.__hash__  # Enum's own goes through the name, in Python


class Rounding(enum.Enum):
    """Effect of a primitive on a relative rounding of its operands."""

    KEPT = "kept"  # it is a relative rounding of the result, at most a few times as large
    STOPPED = "stopped"  # the result is bounded, or discrete: a small error at most
    CANCELLING = "cancelling"  # amplified where terms nearly cancel
    AMPLIFIED = "amplified"  # by a steep slope, or by the size of the operand

    __hash__ = object.__hash__  # Enum's own goes through the name, in Python


class Pole(enum.Enum):
    """Singularity of a function of one operand."""

    NONE = "none"
    ZERO = "zero"
    NUMBER = "number"  # a number other than zero, beyond which it is undefined

    __hash__ = object.__hash__  # Enum's own goes through the name, in Python


@dataclass(frozen=True, slots=True)
class Semantics:
    """One line of the table.

    Attributes:
      linear: in which operands the result is linear.
      rounding: effect on a relative rounding of the operands.
      range: where the result lies, given where the operands do. A reduction gets the number of its
        terms beside its operand, and `integer_pow` its power.
      pole: where the function is singular.
      decays: whether the result may be below the range of float16 though its operands are not.
      whole: whether the result is a whole number if all operands are.

    >>> semantics_of("exp").rounding, semantics_of("exp").range(Interval(0, math.inf))
    (<Rounding.AMPLIFIED: 'amplified'>, Interval(low=1.0, high=inf))
    """

    linear: Linear
    rounding: Rounding
    range: Transfer = anywhere
    pole: Pole = Pole.NONE
    decays: bool = False
    whole: bool = False


def _sum(range: Transfer) -> Semantics:
    """Return the line of a sum of many terms: their roundings average out."""
    return Semantics(Linear.ALL, Rounding.KEPT, range, whole=True)


def _choice(range: Transfer = itself) -> Semantics:
    return Semantics(Linear.ALL, Rounding.KEPT, range, whole=True)


def _fold(range: Transfer = anywhere, decays: bool = False) -> Semantics:
    return Semantics(Linear.NOT, Rounding.AMPLIFIED, range, decays=decays, whole=True)


def _mild(range: Transfer, pole: Pole = Pole.NONE) -> Semantics:
    return Semantics(Linear.NOT, Rounding.KEPT, range, pole)


def _bounded(range: Transfer, decays: bool = False) -> Semantics:
    return Semantics(Linear.NOT, Rounding.STOPPED, range, decays=decays)


def _steep(range: Transfer = anywhere, pole: Pole = Pole.NONE, decays: bool = False) -> Semantics:
    return Semantics(Linear.NOT, Rounding.AMPLIFIED, range, pole, decays)


def _of_parts(x: Interval, _: Interval, y: Interval) -> Interval:
    """Return the interval of what a scatter picks: from the array, or from the updates."""
    return hull(x, y)


def _some(x: Interval) -> Interval:
    """Return the interval of the sum of any number of terms, none perhaps."""
    return multiplied(x, NONNEGATIVE)


_MASK = Semantics(Linear.NOT, Rounding.STOPPED, within(0, 1), whole=True)
_HALF_TURN, _QUARTER_TURN = math.pi, math.pi / 2


SEMANTICS: dict[str, Semantics] = {
    # Reduction: sums.
    "reduce_sum": _sum(multiplied),
    "reduce_window_sum": _sum(lambda x, terms: _some(x)),
    "select_and_scatter_add": _sum(lambda source, operand: _some(source)),
    "scatter-add": _sum(lambda x, at, updates: added(x, _some(updates))),
    "scatter-sub": _sum(lambda x, at, updates: subtracted(x, _some(updates))),
    "add_any": _sum(added),  # cotangents: no program subtracts them from each other
    "psum": _sum(multiplied),
    "psum_invariant": _sum(multiplied),
    "unreduced_psum": _sum(multiplied),
    "reduce_scatter": _sum(multiplied),
    "unreduced_reduce_scatter": _sum(multiplied),
    # Reduction: folds. What is read of running ones are differences.
    "cumsum": _fold(lambda x, terms: hull(x, multiplied(x, terms))),
    "cumprod": _fold(product_of_many, decays=True),
    "cumlogsumexp": _fold(lambda x, terms: Interval(x.low, math.inf)),
    "reduce_prod": _fold(product_of_many, decays=True),
    "scatter-mul": _fold(lambda x, at, updates: product_of_many(hull(x, updates))),
    "reduce": _fold(),
    "reduce_window": _fold(),
    "select_and_scatter": _fold(),
    # Reduction and data movement: picks or orders operands.
    "reduce_max": _choice(),
    "reduce_min": _choice(),
    "cummax": _choice(),
    "cummin": _choice(),
    "reduce_window_max": _choice(),
    "reduce_window_min": _choice(),
    "scatter-max": _choice(_of_parts),
    "scatter-min": _choice(_of_parts),
    "select_and_gather_add": _choice(),
    "pmax": _choice(),
    "pmin": _choice(),
    "unreduced_pmax": _choice(),
    "unreduced_pmin": _choice(),
    "sort": _choice(),
    "top_k": _choice(),
    "approx_top_k": _choice(),
    "argmax": _bounded(within(0, math.inf)),
    "argmin": _bounded(within(0, math.inf)),
    # Elementwise: never rounds.
    "abs": Semantics(Linear.NOT, Rounding.KEPT, magnitude, whole=True),
    "neg": _choice(negated),
    "sign": Semantics(Linear.NOT, Rounding.STOPPED, rising(np.sign, bottom=-1, top=1), whole=True),
    "max": _choice(larger),
    "min": _choice(smaller),
    "clamp": _choice(clamped),
    "select_n": _choice(selected),
    "copy": _choice(),
    "stop_gradient": _choice(),
    "is_finite": _MASK,
    "eq": _MASK,
    "ne": _MASK,
    "lt": _MASK,
    "le": _MASK,
    "gt": _MASK,
    "ge": _MASK,
    "eq_to": _MASK,
    "lt_to": _MASK,
    "le_to": _MASK,
    # Elementwise: the exact result, rounded once.
    "add": Semantics(Linear.ALL, Rounding.CANCELLING, added, whole=True),
    "sub": Semantics(Linear.ALL, Rounding.CANCELLING, subtracted, whole=True),
    "mul": Semantics(Linear.EACH, Rounding.KEPT, multiplied, whole=True),
    "div": Semantics(Linear.FIRST, Rounding.KEPT, divided),
    "sqrt": _mild(rising(math.sqrt, 0, 0)),
    # Elementwise: integer-valued results.
    "ceil": _steep(rising(np.ceil)),
    "floor": _steep(rising(np.floor)),
    "round": _steep(lambda x: Interval(np.ceil(x.low - 0.5), np.floor(x.high + 0.5))),
    # Elementwise: well-behaved curves.
    "tanh": _bounded(rising(math.tanh, bottom=-1, top=1)),
    "logistic": _bounded(rising(lambda x: 1 / (1 + math.exp(-x)), bottom=0, top=1), decays=True),
    "erf": _bounded(rising(math.erf, bottom=-1, top=1)),
    "atan": _bounded(rising(math.atan, bottom=-_QUARTER_TURN, top=_QUARTER_TURN)),
    "asinh": _bounded(rising(math.asinh)),
    "bessel_i0e": _bounded(within(0, 1)),
    "bessel_i1e": _bounded(within(-1, 1)),
    # Elementwise: steep, cancelling or fast-growing.
    "exp": _steep(rising(math.exp, bottom=0), decays=True),
    "exp2": _steep(rising(lambda x: 2.0**x, bottom=0), decays=True),
    "expm1": _steep(rising(math.expm1, bottom=-1)),
    "log": _steep(rising(math.log, 0), Pole.ZERO),
    "log2": _steep(rising(math.log2, 0), Pole.ZERO),
    "log1p": _steep(rising(math.log1p, -1), Pole.NUMBER),
    "pow": _steep(raised),
    "integer_pow": _mild(raised),  # if the power is small
    "square": _mild(squared),
    "rsqrt": _mild(falling(lambda x: 1 / math.sqrt(x), 0, math.inf, 0), Pole.ZERO),
    "cbrt": _mild(rising(np.cbrt)),
    "rem": _steep(remainder),
    "sin": _steep(within(-1, 1)),
    "cos": _steep(within(-1, 1)),
    "tan": _steep(),
    "sinh": _steep(rising(math.sinh)),
    "cosh": _steep(within(1, math.inf)),
    "asin": _steep(
        rising(lambda x: math.asin(min(x, 1)), -1, -_QUARTER_TURN, _QUARTER_TURN), Pole.NUMBER
    ),
    "acos": _steep(falling(lambda x: math.acos(min(x, 1)), -1, _HALF_TURN, 0), Pole.NUMBER),
    "acosh": _steep(within(0, math.inf), Pole.NUMBER),
    "atanh": _steep(pole=Pole.NUMBER),
    "atan2": _steep(within(-_HALF_TURN, _HALF_TURN)),
    "erfc": _steep(falling(math.erfc, -math.inf, 2, 0), decays=True),
    "erf_inv": _steep(pole=Pole.NUMBER),
    "one_minus_square": _steep(one_minus_squared),
    "polynomial": _steep(),
    "lgamma": _steep(pole=Pole.ZERO),
    "digamma": _steep(pole=Pole.ZERO),
    "polygamma": _steep(),
    "zeta": _steep(),
    "igamma": _steep(within(0, 1)),
    "igammac": _steep(within(0, 1)),
    "igamma_grad_a": _steep(),
    "regularized_incomplete_beta": _steep(within(0, 1)),
}

_UNLISTED = {  # what a user registers, by its trait
    Trait.SUM: _sum(anywhere),
    Trait.ALLREDUCE: _sum(anywhere),
    Trait.EXTREMUM: _choice(anywhere),
    Trait.EXACT: _mild(anywhere),
    Trait.ROUNDED: _mild(anywhere),
    Trait.SMOOTH: _bounded(anywhere),
}

_OTHER = _steep()
_ARITHMETIC = (OpKind.ELEMENTWISE, OpKind.REDUCTION)


def semantics_of(name: str, op: Op | None = None) -> Semantics:
    """Return the semantics of a primitive, of a user's by the trait that it was registered with.

    Args:
      name: of the primitive.
      op: its entry in the taxonomy, if there is one.
    """
    if found := SEMANTICS.get(name):
        return found
    if op is None or op.kind not in _ARITHMETIC:
        return _OTHER
    return _UNLISTED.get(op.trait, _OTHER)
