"""The arithmetic of a primitive: what it does to roundings, and where its results lie.

These are the words of which ``taxonomy.TABLE`` is made, facts of single primitives. What follows
from them for a program is in ``plan/``.

See: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, SIAM 2002, chapter 1 for
condition numbers and cancellation.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxamp.core.enum_words import Word
from jaxamp.core.intervals import Transfer, anywhere, itself


class Linear(Word):
    """Linearity of a result in its operands."""

    NOT = "not"
    ALL = "all"  # in all of them at once: sums, and choices between them
    EACH = "each"  # in each with the others fixed: products
    FIRST = "first"  # in the first alone: quotients


class Rounding(Word):
    """Effect of a primitive on a relative rounding of its operands."""

    KEPT = "kept"  # it is a relative rounding of the result, at most a few times as large
    STOPPED = "stopped"  # the result is bounded, or discrete: a small error at most
    CANCELLING = "cancelling"  # amplified where terms nearly cancel
    AMPLIFIED = "amplified"  # by a steep slope, or by the size of the operand


class Pole(Word):
    """Singularity of a function of one operand."""

    NONE = "none"
    ZERO = "zero"
    NUMBER = "number"  # a number other than zero, beyond which it is undefined


@dataclass(frozen=True, slots=True)
class Semantics:
    """Arithmetic of a primitive that is elementwise, reduces or orders."""

    linear: Linear  # in which operands the result is linear
    rounding: Rounding  # effect on a relative rounding of the operands
    # Where the result lies, given where the operands do. A reduction gets the number of its terms
    # beside its operand, and `integer_pow` its power.
    range: Transfer = anywhere
    pole: Pole = Pole.NONE  # where the function is singular
    # Whether the result may be below the range of float16 though its operands are not.
    decays: bool = False
    whole: bool = False  # whether the result is a whole number if all operands are
    # Whether the result is the same whenever the first operand grows by some number.
    periodic: bool = False


def kept(range: Transfer = itself) -> Semantics:
    """Return that of a choice, of a negative, or of a sum of many: their roundings average out."""
    return Semantics(Linear.ALL, Rounding.KEPT, range, whole=True)


def cancelling(range: Transfer) -> Semantics:
    """Return that of a sum or difference of two."""
    return Semantics(Linear.ALL, Rounding.CANCELLING, range, whole=True)


def product(range: Transfer) -> Semantics:
    """Return that of a product of two."""
    return Semantics(Linear.EACH, Rounding.KEPT, range, whole=True)


def quotient(range: Transfer) -> Semantics:
    """Return that of a quotient."""
    return Semantics(Linear.FIRST, Rounding.KEPT, range)


def fold(range: Transfer = anywhere, decays: bool = False) -> Semantics:
    """Return that of a fold other than a sum, or of one that shows partial results."""
    return Semantics(Linear.NOT, Rounding.AMPLIFIED, range, decays=decays, whole=True)


def mild(range: Transfer, pole: Pole = Pole.NONE, whole: bool = False) -> Semantics:
    """Return that of a curve of small relative slope."""
    return Semantics(Linear.NOT, Rounding.KEPT, range, pole, whole=whole)


def bounded(range: Transfer, decays: bool = False, whole: bool = False) -> Semantics:
    """Return that of a curve whose results are bounded or discrete."""
    return Semantics(Linear.NOT, Rounding.STOPPED, range, decays=decays, whole=whole)


def steep(range: Transfer = anywhere, pole: Pole = Pole.NONE, decays: bool = False) -> Semantics:
    """Return that of a curve of large relative slope, and of what is not known."""
    return Semantics(Linear.NOT, Rounding.AMPLIFIED, range, pole, decays)


def wave(range: Transfer = anywhere) -> Semantics:
    """Return that of a periodic function of its first operand."""
    return Semantics(Linear.NOT, Rounding.AMPLIFIED, range, periodic=True)


UNKNOWN = steep()
