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
    fn = jax.jit(
        _ordered(program, order, functools.partial(amp, policy=POLICIES[low])),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    got = jax.tree.map(np.asarray, fn(*program.args))
    errors = _errors(got, reference)
    allowed = _errors(rounded[low], reference)
    leaves = [Leaf(place, error, allowed[place]) for place, error in errors.items()]
    return Outcome(name, low, order, tuple(leaves))


@functools.cache
def expected(name: str) -> tuple[Any, dict[str, Any]]:
    """Compute a program in float64, and in float32 with rounded products in each format."""
    program = FIELD_PROGRAMS[name]
    oracles = [Oracle(np.float64), *(Oracle(np.float32, low) for low in LOW.values())]
    reference, *rounded = evaluated(_ordered(program, ORDERS[1]), program.args, oracles)
    return reference, dict(zip(LOW, rounded, strict=True))


def _ordered(program: FieldProgram, order: str, wrap: Callable[..., Any] = lambda fn: fn) -> Any:
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
