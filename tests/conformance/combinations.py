"""The whole product programs × transforms × presets as jobs."""

from __future__ import annotations

from tests import products
from tests.conformance.jobs import Job
from tests.products import Case


def all_jobs() -> list[Job]:
    """One job for each case of the product."""
    return [Job("combinations", str(case)) for case in products.every_case()]


def run(name: str) -> None:
    """Checks one case: types, jaxpr, products, values; or that JAX itself refuses it.

    Raises:
        AssertionError: if the case is wrong.
    """
    case = Case(*name.split("-"))
    if case.refusal is not None:
        products.check_refused(case)
        return
    products.check_lowering(case)
    if case.preset != "always_f16" or case.transform in ("plain", "jit"):
        products.check_values(case)
