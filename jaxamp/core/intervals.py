"""Interval arithmetic: where the result of a primitive lies, given where its operands do.

NaN is no number, and beside all intervals. What depends on more than the intervals, such as the
number of terms of a sum, is passed as one more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_INF = math.inf


class Interval(NamedTuple):
    """The numbers from `low` to `high`, both included."""

    low: float
    high: float


Transfer = Callable[..., Interval]
"""From intervals of operands to that of the result."""

ANYWHERE = Interval(-_INF, _INF)
NONNEGATIVE = Interval(0.0, _INF)


def anywhere(*_: Interval) -> Interval:
    """Return the interval of all numbers."""
    return ANYWHERE


def within(low: float, high: float) -> Transfer:
    """Return the transfer of a function whose results are between two numbers."""
    interval = Interval(float(low), float(high))
    return lambda *_: interval


def itself(operand: Interval, *_: Interval) -> Interval:
    """Return the first operand's interval."""
    return operand


def hull(*parts: Interval) -> Interval:
    """Return the least interval that contains others.

    >>> hull(Interval(0, 1), Interval(3, 4))
    Interval(low=0, high=4)
    """
    return Interval(min(p.low for p in parts), max(p.high for p in parts))


def rising(
    curve: Callable[[float], float], start: float = -_INF, bottom: float = -_INF, top: float = _INF
) -> Transfer:
    """Return the transfer of a rising function, `curve`, of a finite number.

    Below `start` it is not defined, where its limit is `bottom`; at infinity its limit is `top`.
    """

    def at(x: float) -> float:
        if x <= start:
            return bottom
        if x == _INF:
            return top
        try:
            return float(curve(x))
        except OverflowError:
            return top if x > 0 else bottom

    return lambda x: Interval(at(x.low), at(x.high))


def negated(x: Interval) -> Interval:
    """Return the interval of `-x`."""
    return Interval(-x.high, -x.low)


def magnitude(x: Interval) -> Interval:
    """Return the interval of `abs(x)`.

    >>> magnitude(Interval(-2, 1)), magnitude(Interval(-2, -1))
    (Interval(low=0.0, high=2), Interval(low=1, high=2))
    """
    low = 0.0 if x.low <= 0 <= x.high else min(abs(x.low), abs(x.high))
    return Interval(low, max(abs(x.low), abs(x.high)))


def larger(x: Interval, y: Interval) -> Interval:
    """Return the interval of `max(x, y)`."""
    return Interval(max(x.low, y.low), max(x.high, y.high))


def smaller(x: Interval, y: Interval) -> Interval:
    """Return the interval of `min(x, y)`."""
    return Interval(min(x.low, y.low), min(x.high, y.high))


def clamped(low: Interval, x: Interval, high: Interval) -> Interval:
    """Return the interval of `clamp(low, x, high)`."""
    return smaller(larger(low, x), high)


def selected(which: Interval, *cases: Interval) -> Interval:
    """Return the interval of `select_n`: of the cases that can be selected.

    >>> selected(Interval(0, 0), Interval(1, 2), ANYWHERE)
    Interval(low=1, high=2)
    """
    last = len(cases) - 1.0
    first, last = (min(max(end, 0.0), last) for end in which)
    return hull(*cases[int(first) : int(last) + 1])


def added(*terms: Interval) -> Interval:
    """Return the interval of a sum; infinities that cancel may be anything."""
    low, high = map(sum, zip(*terms, strict=True))
    return Interval(-_INF if low != low else low, _INF if high != high else high)


def subtracted(x: Interval, y: Interval) -> Interval:
    """Return the interval of `x - y`."""
    return added(x, negated(y))


def multiplied(x: Interval, y: Interval) -> Interval:
    """Return the interval of `x * y`, or of a sum of `y` terms that lie in `x`.

    >>> multiplied(Interval(-1, 2), Interval(0, 3))
    Interval(low=-3, high=6)
    """
    ends = [a * b if a and b else 0.0 for a in x for b in y]
    return Interval(min(ends), max(ends))


def divided(x: Interval, y: Interval) -> Interval:
    """Return the interval of `x / y`: all numbers, if the sign of the divisor is not known."""
    if y.low < 0 and y.high <= 0:
        return divided(negated(x), negated(y))
    if y.low < 0 or y.high <= 0:
        return ANYWHERE
    return multiplied(x, Interval(1 / y.high, 1 / y.low if y.low else _INF))


def squared(x: Interval) -> Interval:
    """Return the interval of `x * x`."""
    size = magnitude(x)
    return multiplied(size, size)


def raised(x: Interval, power: Interval) -> Interval:
    """Return the interval of `x ** power`; negative numbers have whole powers alone."""
    if x.low < 0:
        is_even = power.low == power.high and power.low % 2 == 0
        return raised(magnitude(x), power) if is_even else ANYWHERE
    ends = [_power(a, b) for a in x for b in power]
    return Interval(min(ends), max(ends))


def _power(x: float, power: float) -> float:
    if x == 0 and power < 0:
        return _INF
    try:
        return x**power
    except OverflowError:
        return _INF


def nearest(x: Interval) -> Interval:
    """Return the interval of whole numbers next to those of another."""
    return Interval(float(np.ceil(x.low - 0.5)), float(np.floor(x.high + 0.5)))


logistic = rising(lambda x: 1 / (1 + math.exp(-x)), bottom=0, top=1)
