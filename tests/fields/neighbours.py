"""Median errors over neighbouring arguments: what a program loses, rather than one draw of it.

Where results are sums that nearly cancel, or a rounding decides a sign or a choice, an error is
mostly chance: that of rounding the products alone may be a thirtieth of what it is for arguments a
little off. Medians over such arguments say whether `amp` loses more.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from tests.fields import measure
from tests.fields.oracle import Oracle, evaluators
from tests.fields.registry import FIELD_PROGRAMS
from tests.fields.report import Row
from tests.numerics.ulps import LOW

_EPS = {"bf16": 2.0**-7, "f16": 2.0**-10}


def measured(name: str, low: str, order: str, count: int) -> measure.Outcome:
    """Run a program in one format and order for several arguments: the median errors of each array.

    Args:
        name: of the program.
        low: a key of `LOW`.
        order: one of `ORDERS`, or `amp`.
        count: how many arguments, the program's own among them.
    """
    program, (exact, rounded) = FIELD_PROGRAMS[name], _oracles(name)
    fn = measure.compiled(measure.ordered(program, order, low))
    runs = [
        measure.compared(jax.tree.map(np.asarray, fn(*args)), exact(*args), rounded[low](*args))
        for args in _neighbours(program.args, _EPS[low] / 8, count)
    ]
    leaves = (_median(leaf) for leaf in zip(*runs, strict=True))
    return measure.Outcome(name, low, order, tuple(leaves))


def rows(name: str, count: int) -> list[Row]:
    """Run a program in all of its ways."""
    ways = measure.cases(name)
    return [measure.row(measured(name, low, order, count)) for low, order in ways]


@functools.lru_cache(maxsize=1)
def _oracles(name: str) -> tuple[Any, dict[str, Any]]:
    """Compile a program in float64, and in float32 with rounded products in each format."""
    program = FIELD_PROGRAMS[name]
    oracles = [Oracle(np.float64), *(Oracle(np.float32, low) for low in LOW.values())]
    fn = measure.ordered(program, measure.ORDERS[1])
    exact, *rounded = evaluators(fn, program.args, oracles)
    return exact, dict(zip(LOW, rounded, strict=True))


def _neighbours(args: Any, relative: float, count: int) -> Iterator[Any]:
    """Yield arguments, and then such with every float32 number a little off."""
    rng = np.random.default_rng(0)

    def moved(x: Any) -> Any:
        x = np.asarray(x)
        if x.dtype != np.float32:
            return x
        return (x * (1 + relative * rng.standard_normal(x.shape))).astype(np.float32)

    yield args
    for _ in range(count - 1):
        yield jax.tree.map(moved, args)


def _median(leaves: tuple[measure.Leaf, ...]) -> measure.Leaf:
    errors, roundings = ([getattr(x, n) for x in leaves] for n in ("error", "rounding"))
    return measure.Leaf(leaves[0].place, float(np.median(errors)), float(np.median(roundings)))
