"""Find products that may be logits: an exponential reads them before another product does."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jaxamp.found.cross_entropy.rows import Rows
from jaxamp.found.levels import Atom, Level, Unit, numbers
from jaxamp.jaxprs.nested import RULED, nested

EXPONENTIALS = ("exp", "exp2")
MOVES = ("transpose", "convert_element_type", "reshape", "squeeze", "copy", "pvary",
         "stop_gradient", "name")  # fmt: skip


class Logits(NamedTuple):
    """A product of activations and a matrix, or several, of which an axis counts tokens."""

    unit: Unit  # the product
    rows: Rows  # where its tokens are
    side: int  # which operand has them
    width: int  # the number of products that a logit is a sum of
    heads: int  # the number of matrices that are multiplied at once
    # Whether the matrix is given to a level, and the activations are made there; that tells several
    # heads from the scores of attention, and words from tokens.
    multiplies_given: bool

    @property
    def matrix(self) -> Any:
        """The type of the matrix."""
        return self.unit.eqn.invars[1 - self.side].aval

    @property
    def words(self) -> int:
        """The number of logits of each token."""
        return self.matrix.size // (self.width * self.heads)


def before_exponentials(level: Level) -> list[Unit]:
    """Return the products whose results an exponential may read before another product does.

    No others are logits. To follow each product to the end takes time that grows with the square of
    a program: nine of the ten seconds in which a step of a ViT-B was traced.
    """
    products: list[Unit] = []
    read = set[int]()  # by an exponential
    for unit in reversed(level.equations):
        is_read = not read.isdisjoint(numbers(unit.outs))
        if unit.eqn.primitive.name == "dot_general":
            products += [unit] * is_read
        elif is_read or unit.eqn.primitive.name in EXPONENTIALS or is_ruled(unit.eqn):
            read.update(numbers(unit.ins))
    return products[::-1]


def logits_of(unit: Unit, level: Level) -> list[Logits]:
    """Return the axes of a product that may count tokens, the longest first."""
    lhs, _, out = (v.aval.shape for v in (*unit.eqn.invars, *unit.eqn.outvars))  # type: ignore[attr-defined]
    (contracted, _), (batch, _) = unit.eqn.params["dimension_numbers"]
    width, heads = math.prod(lhs[i] for i in contracted), math.prod(out[: len(batch)])
    first = len(lhs) - len(contracted)  # axis of the result that is of the second operand
    made = [source(level, atom) in level.makers for atom in unit.ins]
    given = [made == [True, False], made == [False, True]]
    found = [
        Logits(unit, Rows(axis, 1, 1, 0, n), side, width, heads, given[side])
        for axis, n in enumerate(out)
        if n > 1 and axis >= len(batch) and (given[side := int(axis >= first)] or not batch)
    ]
    return sorted(found, key=lambda logits: -logits.rows.length)


def source(level: Level, atom: Atom) -> Atom:
    """Return the value that another one is moved from."""
    unit = level.makers.get(atom) if isinstance(atom, int) else None
    if unit is None or unit.eqn.primitive.name not in MOVES:
        return atom
    return source(level, unit.ins[0])


def _exponentiates(eqn: JaxprEqn) -> bool:
    """Return whether an equation is an exponential, or holds one."""
    inside = (inner for body in nested(eqn) for inner in body.jaxpr.eqns)
    return eqn.primitive.name in EXPONENTIALS or any(map(_exponentiates, inside))


def is_ruled(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a function of exponentials with a derivative of its own."""
    return eqn.primitive.name in RULED and _exponentiates(eqn)
