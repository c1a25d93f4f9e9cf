"""The arithmetic of each primitive: what it does to roundings, signs and ranges.

``SEMANTICS`` has a line for every primitive that is elementwise, reduces or orders; for all others
the trait in ``taxonomy.TABLE`` is enough. It lists facts of single primitives. What follows from
them for a program is in ``plan/``.

See: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, SIAM 2002, chapter 1 for
condition numbers and cancellation.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

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
      pole: where the function is singular.
      nonnegative: whether the result is never negative.
      keeps_sign: whether the result is not negative if no operand is.
      keeps_nonzero: whether the result is away from zero if all operands are.
      decays: whether the result may be below the range of float16 though its operands are not.
      monotone: the function itself, if it is a monotone one of one operand.

    >>> semantics_of("exp").rounding, semantics_of("exp").nonnegative
    (<Rounding.AMPLIFIED: 'amplified'>, True)
    """

    linear: Linear
    rounding: Rounding
    pole: Pole = Pole.NONE
    nonnegative: bool = False
    keeps_sign: bool = False
    keeps_nonzero: bool = False
    decays: bool = False
    monotone: Callable[[float], float] | None = None


_SUM = Semantics(Linear.ALL, Rounding.CANCELLING)
_MEAN = Semantics(Linear.ALL, Rounding.KEPT)  # many terms: their roundings average out
_CHOICE = Semantics(Linear.ALL, Rounding.KEPT)
_CHOSEN = Semantics(Linear.ALL, Rounding.KEPT, keeps_sign=True, keeps_nonzero=True)
_FOLD = Semantics(Linear.NOT, Rounding.AMPLIFIED)
_PRODUCT = Semantics(Linear.NOT, Rounding.AMPLIFIED, decays=True)
_DISCRETE = Semantics(Linear.NOT, Rounding.STOPPED)
_BOUNDED = Semantics(Linear.NOT, Rounding.STOPPED)
_MILD = Semantics(Linear.NOT, Rounding.KEPT)
_STEEP = Semantics(Linear.NOT, Rounding.AMPLIFIED)
_STEEP_NEAR_ZERO = Semantics(Linear.NOT, Rounding.AMPLIFIED, Pole.ZERO)
_STEEP_NEAR_ONE = Semantics(Linear.NOT, Rounding.AMPLIFIED, Pole.NUMBER)


def _steep(**facts: Any) -> Semantics:
    return replace(_STEEP, **facts)


SEMANTICS: dict[str, Semantics] = {
    # Reduction: sums.
    "reduce_sum": _MEAN,
    "reduce_window_sum": _MEAN,
    "select_and_scatter_add": _MEAN,
    "scatter-add": _MEAN,
    "scatter-sub": _MEAN,
    "add_any": _MEAN,  # cotangents: no program subtracts them from each other
    "psum": _MEAN,
    "psum_invariant": _MEAN,
    "unreduced_psum": _MEAN,
    "reduce_scatter": _MEAN,
    "unreduced_reduce_scatter": _MEAN,
    # Reduction: folds. What is read of running ones are differences.
    "cumsum": _FOLD,
    "cumprod": _PRODUCT,
    "cumlogsumexp": _FOLD,
    "reduce_prod": _PRODUCT,
    "scatter-mul": _FOLD,
    "reduce": _FOLD,
    "reduce_window": _FOLD,
    "select_and_scatter": _FOLD,
    # Reduction and data movement: picks or orders operands.
    "reduce_max": _CHOICE,
    "reduce_min": _CHOICE,
    "cummax": _CHOICE,
    "cummin": _CHOICE,
    "reduce_window_max": _CHOICE,
    "reduce_window_min": _CHOICE,
    "scatter-max": _CHOICE,
    "scatter-min": _CHOICE,
    "select_and_gather_add": _CHOICE,
    "pmax": _CHOICE,
    "pmin": _CHOICE,
    "unreduced_pmax": _CHOICE,
    "unreduced_pmin": _CHOICE,
    "sort": _CHOICE,
    "top_k": _CHOICE,
    "approx_top_k": _CHOICE,
    "argmax": _DISCRETE,
    "argmin": _DISCRETE,
    # Elementwise: never rounds.
    "abs": Semantics(Linear.NOT, Rounding.KEPT, nonnegative=True),
    "neg": Semantics(Linear.ALL, Rounding.KEPT, monotone=lambda x: -x),
    "sign": Semantics(Linear.NOT, Rounding.STOPPED, monotone=np.sign),
    "max": _CHOICE,
    "min": _CHOSEN,
    "clamp": _CHOSEN,
    "select_n": _CHOICE,
    "copy": replace(_CHOSEN, monotone=lambda x: x),
    "stop_gradient": _CHOSEN,
    "is_finite": _DISCRETE,
    "eq": _DISCRETE,
    "ne": _DISCRETE,
    "lt": _DISCRETE,
    "le": _DISCRETE,
    "gt": _DISCRETE,
    "ge": _DISCRETE,
    "eq_to": _DISCRETE,
    "lt_to": _DISCRETE,
    "le_to": _DISCRETE,
    # Elementwise: the exact result, rounded once.
    "add": _SUM,
    "sub": _SUM,
    "mul": Semantics(Linear.EACH, Rounding.KEPT, keeps_sign=True),
    "div": Semantics(Linear.FIRST, Rounding.KEPT, keeps_sign=True),
    "sqrt": Semantics(Linear.NOT, Rounding.KEPT, nonnegative=True, keeps_nonzero=True),
    # Elementwise: integer-valued results.
    "ceil": _steep(monotone=np.ceil),
    "floor": _steep(monotone=np.floor),
    "round": _STEEP,
    # Elementwise: well-behaved curves.
    "tanh": Semantics(Linear.NOT, Rounding.STOPPED, monotone=np.tanh),
    "logistic": Semantics(Linear.NOT, Rounding.STOPPED, nonnegative=True, decays=True),
    "erf": _BOUNDED,
    "atan": _BOUNDED,
    "asinh": _BOUNDED,
    "bessel_i0e": _BOUNDED,
    "bessel_i1e": _BOUNDED,
    # Elementwise: steep, cancelling or fast-growing.
    "exp": _steep(nonnegative=True, decays=True, monotone=np.exp),
    "exp2": _steep(nonnegative=True, decays=True, monotone=np.exp2),
    "expm1": _steep(keeps_sign=True, monotone=np.expm1),
    "log": _STEEP_NEAR_ZERO,
    "log2": _STEEP_NEAR_ZERO,
    "log1p": replace(_STEEP_NEAR_ONE, keeps_sign=True),
    "pow": _STEEP,
    "integer_pow": _MILD,  # if the power is small
    "square": Semantics(Linear.NOT, Rounding.KEPT, nonnegative=True),
    "rsqrt": Semantics(Linear.NOT, Rounding.KEPT, Pole.ZERO, nonnegative=True),
    "cbrt": _MILD,
    "rem": _STEEP,
    "sin": _STEEP,
    "cos": _STEEP,
    "tan": _STEEP,
    "sinh": _steep(monotone=np.sinh),
    "cosh": _steep(nonnegative=True),
    "asin": _STEEP_NEAR_ONE,
    "acos": _STEEP_NEAR_ONE,
    "acosh": _STEEP_NEAR_ONE,
    "atanh": _STEEP_NEAR_ONE,
    "atan2": _STEEP,
    "erfc": _steep(nonnegative=True, decays=True),
    "erf_inv": _STEEP_NEAR_ONE,
    "one_minus_square": _STEEP,
    "polynomial": _STEEP,
    "lgamma": _STEEP_NEAR_ZERO,
    "digamma": _STEEP_NEAR_ZERO,
    "polygamma": _STEEP,
    "zeta": _STEEP,
    "igamma": _STEEP,
    "igammac": _STEEP,
    "igamma_grad_a": _STEEP,
    "regularized_incomplete_beta": _STEEP,
}

_UNLISTED = {  # what a user registers, by its trait
    Trait.SUM: _MEAN,
    Trait.ALLREDUCE: _MEAN,
    Trait.EXTREMUM: _CHOICE,
    Trait.EXACT: _MILD,
    Trait.ROUNDED: _MILD,
    Trait.SMOOTH: _BOUNDED,
}

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
        return _STEEP
    return _UNLISTED.get(op.trait, _STEEP)
