"""Runs one hostile case in every way that the table shows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxamp import PrecisionPolicy, amp
from tests.numerics.hostile import CASES, Case
from tests.numerics.oracle import products_rounded
from tests.numerics.ulps import LOW, POLICIES, error

ALLOWED = 2.0
"""Ulps that may be lost beyond what rounding the operands of the products costs."""


WAYS = ("rounding", "literal", "naive", "amp")
"""Of running a case: only its products' operands rounded; the policy's table without guards; the
same with nothing accumulated in float32, as by casting everything; jaxamp."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One case in one low format; errors in ulps.

    Attributes:
        case: what is run.
        low: a key of `LOW`.
    """

    case: Case
    low: str

    def error(self, way: str) -> float:
        """The error of one of `WAYS`."""
        expected = plain(self.case.name)
        got = result(self.case.name, self.low, way)
        return error(got, expected, self.low, per_element=self.case.per_element)

    @property
    def bound(self) -> float:
        """The error that jaxamp may have."""
        return ALLOWED + (0.0 if self.case.keeps_products else self.error("rounding"))

    @property
    def holds(self) -> bool:
        """Whether jaxamp keeps to the bound."""
        return self.error("amp") <= self.bound

    @property
    def hostile(self) -> bool:
        """Whether a careless way of lowering, or of rounding the products, is beyond the bound."""
        careless = ["literal", "naive", *(["rounding"] if self.case.keeps_products else [])]
        return any(self.error(way) > self.bound for way in careless)

    def elements(self, way: str | None = None) -> np.ndarray:
        """All numbers of a result in a row; of the float32 one by default."""
        name = self.case.name
        tree = result(name, self.low, way) if way else plain(name)
        return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)])


@functools.cache
def plain(name: str) -> Any:
    """The float32 result of a case."""
    case = CASES[name]
    return _run(case.after(case.fn), case)


@functools.cache
def result(name: str, low: str, way: str) -> Any:
    """The result of a case in one of `WAYS`."""
    case = CASES[name]
    if way == "rounding":
        return _run(products_rounded(case.after(case.fn), LOW[low]), case)
    policy = PrecisionPolicy.parse(POLICIES[low])
    policies = {
        "amp": policy,
        "literal": policy.replace(guards=()),
        "naive": policy.replace(guards=(), accumulation=None),
    }
    return _run(case.after(amp(case.fn, policies[way])), case)


def _run(fn: Any, case: Case) -> Any:
    """Compiled fast rather than well."""
    jitted = jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})
    return jax.tree.map(np.asarray, jitted(*case.args))
