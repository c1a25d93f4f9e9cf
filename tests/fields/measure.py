"""Runs one program of a field in one format and one order, and says whether it holds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp import amp
from tests.fields import programs  # noqa: F401 - enters them
from tests.fields.oracle import Oracle, evaluated
from tests.fields.registry import FIELD_PROGRAMS, FieldProgram
from tests.fields.report import Row
from tests.numerics.ulps import LOW, POLICIES

TIMES = 3.0
"""An error may be so many times that of rounding operands and results of products alone."""

SMALL = 0.01
"""An error, relative to the largest element, that is never counted."""

ORDERS = ("grad(amp)", "amp(grad)")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a result: its errors relative to its largest element in float64.

    Attributes:
        place: where it is in the result.
        error: of `amp`.
        rounding: of rounding operands and results of products alone, all else float32.
    """

    place: str
    error: float
    rounding: float

    @property
    def excess(self) -> float:
        """The error over what is allowed; wrong from 1 on."""
        return self.error / max(SMALL, TIMES * self.rounding)

    @property
    def decided(self) -> bool:
        """Whether rounding the products leaves anything to be compared."""
        return TIMES * self.rounding < 1.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A program in one format and order.

    Attributes:
        name: of the program.
        low: a key of `LOW`.
        order: one of `ORDERS`, or `amp` for a program that is run forward.
        leaves: of the result.
    """

    name: str
    low: str
    order: str
    leaves: tuple[Leaf, ...]

    @property
    def worst(self) -> Leaf:
        """The array that is beyond what is allowed by most."""
        return max(self.leaves, key=lambda leaf: leaf.excess if leaf.decided else 0.0)

    @property
    def undecided(self) -> int:
        """How many arrays are ruined by rounding the products alone, and are not compared."""
        return sum(not leaf.decided for leaf in self.leaves)

    @property
    def wrong(self) -> bool:
        """Whether an array that can be compared is beyond what is allowed."""
        return self.worst.decided and not self.worst.excess <= 1.0


def cases(name: str) -> list[tuple[str, str]]:
    """The formats and orders in which a program is run."""
    orders = ("amp",) if FIELD_PROGRAMS[name].forward else ORDERS
    return [(low, order) for low in LOW for order in orders]


def measured(name: str, low: str, order: str) -> Outcome:
    """Run a program in one format and order."""
    program = FIELD_PROGRAMS[name]
    reference, rounded = expected(name)
    got = run(ordered(program, order, low), program.args)
    return Outcome(name, low, order, compared(got, reference, rounded[low]))


def run(fn: Callable[..., Any], args: Any) -> Any:
    """Run a function compiled fast rather than well."""
    return jax.tree.map(np.asarray, compiled(fn)(*args))


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function fast rather than well."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def compared(got: Any, reference: Any, rounded: Any) -> tuple[Leaf, ...]:
    """Compare a result with that of float64, and with that of rounded products."""
    errors, allowed = _errors(got, reference), _errors(rounded, reference)
    return tuple(Leaf(place, error, allowed[place]) for place, error in errors.items())


def rows(name: str) -> list[Row]:
    """Run a program in all of its ways."""
    return [row(measured(name, low, order)) for low, order in cases(name)]


def row(outcome: Outcome) -> Row:
    """Keep the worst array of an outcome."""
    worst = outcome.worst
    return Row(
        name=outcome.name,
        low=outcome.low,
        order=outcome.order,
        wrong=outcome.wrong,
        place=worst.place,
        error=worst.error,
        rounding=worst.rounding,
        arrays=len(outcome.leaves),
        undecided=outcome.undecided,
    )


@functools.cache
def expected(name: str) -> tuple[Any, dict[str, Any]]:
    """Compute a program in float64, and in float32 with rounded products in each format."""
    program = FIELD_PROGRAMS[name]
    oracles = [Oracle(np.float64), *(Oracle(np.float32, low) for low in LOW.values())]
    reference, *rounded = evaluated(ordered(program, ORDERS[1]), program.args, oracles)
    return reference, dict(zip(LOW, rounded, strict=True))


def ordered(program: FieldProgram, order: str, low: str | None = None) -> Callable[..., Any]:
    """Build what is run of a program: itself or its value and gradient, under `amp` or not."""

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        return amp(fn, policy=POLICIES[low]) if low else fn

    if program.forward:
        return wrap(program.fn)
    grad = functools.partial(jax.value_and_grad, has_aux=program.aux)
    return grad(wrap(program.fn)) if order == ORDERS[0] else wrap(grad(program.fn))


def _errors(got: Any, reference: Any) -> dict[str, float]:
    """Measure the floating-point arrays of a result, by their places."""
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(reference), strict=True)
    return {
        jax.tree_util.keystr(path): _error(x, y)
        for (path, x), y in pairs
        if jnp.issubdtype(y.dtype, np.floating)
    }


def _error(got: np.ndarray, reference: np.ndarray) -> float:
    off = np.abs(got.astype(np.float64) - reference).max(initial=0.0)
    size = np.abs(reference).max(initial=0.0)
    if off == 0:
        return 0.0
    return float(off / size) if np.isfinite(off) and size else float("inf")
